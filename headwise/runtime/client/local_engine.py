"""The engine in this process: for scripts, tests, benchmarks and machines without Ray."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from headwise.errors import ConfigError, InvalidRequestError
from headwise.kernels.cuda.cards import count_cards
from headwise.runtime.client.local_calls import LocalCalls
from headwise.runtime.client.worker_process import WorkerProcess, has_channel
from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.config.cache_options import storage_without_host_cache
from headwise.runtime.config.device import resolve_device
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.images import without_images
from headwise.runtime.config.model_card import ModelCard, with_pool
from headwise.runtime.config.new_weights import with_weights
from headwise.runtime.encoder.image_encoder import ImageEncoder
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.chat import CHAT_OPTIONS, Chat, chat_of
from headwise.runtime.loader.chat_images import take_images
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.executor import Executor
from headwise.runtime.protocol.images import IMAGE_LIMITS, embeds_of
from headwise.runtime.protocol.request import GenerationResult, OutputDelta, SamplingParams
from headwise.runtime.protocol.weights import adapter_changes, new_weights
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.memory_check import check_memory
from headwise.runtime.worker.worker import ModelWorker
from headwise.sharing_order import pieces_of, sharing_order

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LocalEngine:
    """Serves requests in this process, with one worker: on a CPU a thread of it, on a GPU a process of its own, so that
    neither of them waits for the other's interpreter. It ends with this one.

    Any thread may call any method at any time, also while streams are open: all requests share the engine's steps.
    While the engine sleeps, streams wait for `wake`.
    """

    def __init__(
        self, config: EngineConfig, device: Device | None = None, *, worker_process: bool | None = None
    ) -> None:
        """``host_cache`` auto is none: nobody fetches from here.

        device:         the configured one, unless another is given
        worker_process: whether the worker has a process of its own; None: on a GPU, where pyzmq is installed and no
                        device is given

        Raises:
            ConfigError: what is configured cannot be had, or needs a host cache, or several ranks, or a device is given
                to another process.
        """
        self.config = config = resolve_device(config, count_cards())
        if config.storage and not config.host_cache_bytes:
            raise storage_without_host_cache()
        is_apart = _has_own_process(config, device) if worker_process is None else worker_process
        if is_apart and device is not None:
            raise ConfigError(
                "a device of this process is none of another one's: give no device, or worker_process=False"
            )
        self.preprocessor = Preprocessor.open(config)
        card, tokenizer = self.preprocessor.card, self.preprocessor.tokenizer
        check_memory(config, card)
        self._lookup = open_lookup(config, card)
        directory = resolve_model(config.model, config.cache_path)
        card, executor = self._open_apart(card, directory) if is_apart else self._open_here(directory, device)
        self.preprocessor = Preprocessor(card, tokenizer)  # with the pool's size, which may have been measured
        self.core = EngineCore(config, card, tokenizer, executor, lookup=self._lookup)
        self._calls = LocalCalls(self.core)
        self._encoder = ImageEncoder.open(config, directory, tokenizer) if config.image_encoders else None

    def _open_apart(self, card: ModelCard, directory: Path) -> tuple[ModelCard, Executor]:
        process = WorkerProcess(self.config, directory)
        # Whoever forgets an engine gets its memory back, as of one that is here.
        self._end_worker: Callable[[], object] = weakref.finalize(self, process.close)
        logger.info("%s, in process %d", process.description, process.pid)
        return with_pool(card, self.config, process.executor.num_blocks * card.layout.block_bytes), process.executor

    def _open_here(self, directory: Path, device: Device | None) -> tuple[ModelCard, Executor]:
        self._worker = ModelWorker(self.config, directory, 0, SingleRank(), device)
        self._worker.initialize_cache()
        self._executor = LocalExecutor(self._worker)
        self._end_worker = self._end_worker_here
        logger.info(self._worker.describe())
        return self._worker.card, self._executor

    def _end_worker_here(self) -> None:
        self._executor.close()
        self._worker.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Run prompts (texts or token ids) as one batch; ``sampling`` is one for all, or one each. With ``n`` above 1
        the result has the samples of the first prompt, then those of the next. ``priority``, ``cache_salt``,
        ``retain_s``, ``retain_tokens`` and ``items`` are those of all prompts: see `Client`. Prompts that begin alike
        are computed one after the other.
        """
        if isinstance(prompts, str):
            raise InvalidRequestError("prompts must be a list of texts or of token ids; for one prompt, a list of one")
        requests = [
            self.preprocessor.prepare(prompt=prompt, sampling=sample, **kwargs)
            for prompt, params in zip(prompts, sampling_of_each(sampling, len(prompts)), strict=True)
            for sample in params.samples()
        ]
        results = {request.request_id: GenerationResult(request.request_id) for request in requests}
        order, _ = sharing_order([pieces_of(request.prompt_token_ids.tobytes()) for request in requests])
        for delta in self._calls.run([requests[place] for place in order.tolist()]):
            results[delta.request_id].add(delta)
        return list(results.values())

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **kwargs: Any) -> Iterator[OutputDelta]:
        """The deltas of one prompt as they come. Closing the iterator aborts the request."""
        return self._calls.run([self.preprocessor.prepare(prompt=prompt, sampling=sampling, **kwargs)])

    def stream_chat(
        self, messages: Chat, sampling: SamplingParams | None = None, **kwargs: Any
    ) -> Iterator[OutputDelta]:
        """Like `stream`, for a chat; see `Client.chat`. Images are encoded in this thread."""
        chat = chat_of(messages, **{name: kwargs.pop(name, None) for name in CHAT_OPTIONS})
        chat, files = take_images(chat, IMAGE_LIMITS)
        if not files:
            return self._calls.run([self.preprocessor.prepare(messages=chat, sampling=sampling, **kwargs)])
        if self._encoder is None:
            raise InvalidRequestError(without_images(self.config, self.preprocessor.card.config))
        encoded = [self._encoder.whole(file) for file in files]
        images = [each.image for each in encoded]
        request = self.preprocessor.prepare(messages=chat, sampling=sampling, images=images, **kwargs)
        return self._calls.run([replace(request, embeds=embeds_of(request, encoded))])

    def sleep(self) -> None:
        """Give back the memory of weights and device cache. Requests wait until `wake`; does nothing if asleep."""
        self._calls.operate("sleep")

    def wake(self) -> None:
        """Load the weights again and go on. Does nothing if awake. Raises `EngineDiedError` if it cannot."""
        self._calls.operate("wake")

    def reset_cache(self, tier: str = "all") -> int:
        """Forget every cached block that no running request needs; how many those were. See `Client.reset_cache`."""
        return self._calls.operate("reset_cache", tier)

    def update_weights(
        self,
        model: str = "",
        *,
        version: str = "",
        keep_running: bool = False,
        adapters: Mapping[str, str] | None = None,
        add_adapters: Mapping[str, str] | None = None,
        drop_adapters: Iterable[str] = (),
    ) -> str:
        """Have the model get the weights of ``model``, or other adapters, and return their version: see
        `Client.update_weights`.

        Raises:
            ModelError, ConfigError: there are none, or they cannot be had. Nothing has changed.
            EngineDiedError: those that there were cannot be had any more either.
        """
        changes = adapter_changes(model, adapters, add_adapters, drop_adapters)
        weights = new_weights(model, version, adapters).over(self.core.weights, changes, self.config.adapters)
        card = with_weights(self.core.card, self.config, weights.model, weights.adapters)
        self._calls.change_weights(NewWeights(weights, card, keep_running))
        self.preprocessor.naming = card.naming
        return weights.version

    def stats(self) -> dict[str, Any]:
        return self.core.stats()

    def close(self) -> None:
        self._calls.close()
        self._end_worker()
        if self._lookup is not None:
            self._lookup.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _has_own_process(config: EngineConfig, device: Device | None) -> bool:
    """Whether a worker gets one where nobody said so: where the device, not the interpreter, is to be waited for."""
    if not config.on_gpu or device is not None:
        return False
    if not has_channel():
        logger.info("the worker is a thread of this process, and shares its interpreter: pyzmq is not installed")
        return False
    return True


def sampling_of_each(sampling: object, count: int) -> list[SamplingParams]:
    """The sampling of each of ``count`` prompts, of which one was given for all or one each.

    Raises `InvalidRequestError`.
    """
    if isinstance(sampling, str) or not isinstance(sampling, Sequence):
        return [SamplingParams.of(sampling)] * count
    if len(sampling) != count:
        raise InvalidRequestError(f"{count} prompts came with {len(sampling)} samplings: give one for all, or one each")
    return [SamplingParams.of(each) for each in sampling]
