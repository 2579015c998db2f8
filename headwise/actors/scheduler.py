"""The actor of the global scheduler."""

from __future__ import annotations

import logging
import math
import threading
import time

from headwise import heap
from headwise.actors.addresses import client_host, endpoint_here
from headwise.actors.ending import Ending, leave_in_time
from headwise.actors.front import About, Front, Keys, UsersOfFile, users_now
from headwise.actors.owner_watch import OwnerWatch
from headwise.actors.placement import node_address
from headwise.actors.ray_metrics import RayMetrics
from headwise.actors.remote import remote
from headwise.errors import DeploymentError
from headwise.log_lines import show_log_lines
from headwise.runtime.client.client import Client
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.images import without_images
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.frontend.routing import RouterOptions
from headwise.runtime.frontend.scaling import Exchange, FleetState, SchedulerNews
from headwise.runtime.frontend.scheduler_server import SchedulerServer
from headwise.runtime.frontend.tokenizer_pool import TokenizerPool
from headwise.runtime.http.deployment_metrics import DeploymentMetrics
from headwise.sockets.curve import ClientKeys, client_key
from headwise.storage.index.store_client import StoreClient

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_BIND_TIMEOUT_S = 10.0
"""How long a restarted scheduler waits for its predecessor's process to free the port."""
_BIND_RETRY_S = 0.02


@remote(max_concurrency=5)
class GlobalScheduler:
    """Holds a `SchedulerServer`. A restarted scheduler binds the same port, so clients and engines find it again.

    start: how many times the scheduler was started before
    """

    def __init__(
        self,
        config: EngineConfig,
        keys: Keys,
        port: int,
        store_endpoint: str,
        start: int = 0,
    ) -> None:
        show_log_lines()
        self._config = config
        self._keys = keys
        self._news: UsersOfFile | None = None
        self._port = port
        self._store_endpoint = store_endpoint
        self._preprocessor: Preprocessor | None = None
        self._tokenising: Preprocessor | None = None
        self._store: StoreClient | None = None  # used by the server's thread while it runs
        self._server: SchedulerServer | None = None
        self._tokenizers: TokenizerPool | None = None
        self._observer: Client | None = None  # asks the server what Ray is told
        self._metrics: RayMetrics | None = None
        self._exchange = Exchange()
        self._owner_watch: OwnerWatch | None = None
        self._asked = 0
        self._is_leaving = False
        self._moved_to: Front | None = None
        self._ending = Ending()
        self._starting, self._opening = threading.Lock(), threading.Lock()
        self._patience_s = _BIND_TIMEOUT_S if start else 0.0

    def ready(self) -> tuple[str, int]:
        """Open the model and serve, unless it does; the node's address and the port. Raises `DeploymentError`,
        `ModelError`."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                with self._starting:  # a new owner may ask before the one before it has an answer
                    return self.address() if self._server is not None else self._serve()
            except DeploymentError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_BIND_RETRY_S)

    def prepare(self) -> None:
        """Open the model, and start all that `ready` needs but the port. Raises `ModelError`."""
        self._open()

    def about(self) -> About:
        if self._is_leaving:
            return About(self._moved_to, is_leaving=True)
        if self._server is None:
            return About()
        return About(Front(*self.address(), self._store_endpoint, self.namespace()), wish=self._exchange.agreed)

    def ended(self) -> None:
        """Return when it is stopped. A caller that waits here learns at once when the process dies."""
        self._ending.wait()

    def _serve(self) -> tuple[str, int]:
        config, (preprocessor, tokenising) = self._config, self._open()
        store = self._store = StoreClient(self._store_endpoint, preprocessor.namespace, self._keys.own)
        users, are_known = users_now(config, self._keys)
        try:
            self._server = SchedulerServer(
                tokenising,
                config.host,
                self._port,
                secret=self._keys.secret,
                model=config.model,
                keys=self._keys.inner,
                users=users,
                users_source=self._users_of_file(),
                users_are_known=are_known,
                replicas=config.first_replicas,
                routing=_router_options(config, preprocessor),
                max_queued=config.max_queued,
                hold_s=config.start_timeout_s,
                store=store,
                index_timeout_s=config.index_timeout_s,
                exchange=self._exchange,
                size=preprocessor.limits.size,
                tokenizers=config.tokenizer_processes,
                without_images=without_images(config, preprocessor.card.config),
                adapters=config.adapters,
            )
        except DeploymentError:
            store.close()
            raise
        heap.settle()
        self._server.start()
        # A successor at another node is the scheduler, and called, when all of the front serves there.
        self._owner_watch = OwnerWatch(config.name, config.owner_timeout_s, config.drain_timeout_s)
        self._owner_watch.start()
        return self.address()

    def _users_of_file(self) -> UsersOfFile | None:
        """What tells of other keys, where clients need any."""
        if self._config.is_encrypted and self._news is None:
            self._news = UsersOfFile(self._config, client_key)
        return self._news

    def _tell_ray(self) -> None:
        observer = self._observer = Client(endpoint_here(self._config.host, self._port), keys=self._keys.own)
        self._metrics = RayMetrics(self._config.name, lambda: DeploymentMetrics(observer.stats()).collect())

    def _open(self) -> tuple[Preprocessor, Preprocessor]:
        """The model's preprocessor, and one that tokenises in other processes: made once."""
        with self._opening:  # a new owner may have it serve while it prepares for the one before
            if self._preprocessor is None or self._tokenising is None:
                self._preprocessor = Preprocessor.open(self._config)
                self._tokenising, self._tokenizers = self._preprocessor.with_pool(self._config)
            return self._preprocessor, self._tokenising

    def namespace(self) -> str:
        """The namespace of the index: which model and cache layout its blocks belong to."""
        assert self._preprocessor is not None
        return self._preprocessor.namespace

    def address(self) -> tuple[str, int]:
        """Of the scheduler: this one, or the one that has taken its place elsewhere."""
        return node_address() if self._moved_to is None else self._moved_to.node, self._port

    def client_address(self) -> str:
        """Where clients connect to: ``tcp://HOST:PORT``."""
        host, port = self.address()
        return f"tcp://{self._config.advertise_host or client_host(self._config.host, host)}:{port}"

    def client_keys(self) -> ClientKeys | None:
        """Those of the deployment's own clients, for others of its Ray cluster, who can do anything with it."""
        return self._keys.own

    def loop_count(self) -> int:
        """See `SchedulerServer`. A standby counts how often it is asked."""
        if self._server is None:
            self._asked += 1
            return self._asked
        return self._server.loop_count

    def follow(self, front: Front) -> None:
        """It is there now: who finds this one is told."""
        self._moved_to = front

    def leave(self, timeout_s: float, until: float = math.inf, front: Front | None = None) -> None:
        """Another scheduler takes its place, on another node. This one serves nobody any more. Streams that its relay
        carries go on; it ends when there are none, or after ``timeout_s``: then `ended` returns.

        until: when the node is taken away, as `time.time` counts somewhere
        front: where the other scheduler is, or soon; None: nobody knows
        """
        self._is_leaving = True
        if front is not None:
            self.follow(front)
        leave_in_time(self._leave, timeout_s, until)

    def _leave(self, timeout_s: float) -> None:
        deadline, server = time.monotonic() + timeout_s, self._server
        if server is not None:
            server.leave()
            self._end_beside()
            server.hang_up()
            while not server.is_quiet and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if not server.is_quiet:
                log.warning("the relay of the scheduler that has left ends streams: its node is about to go")
        self.stop()

    def stop(self) -> None:
        self._end_beside()
        if self._server is not None:
            self._server.stop()
        if self._store is not None:
            self._store.close()
        self._ending.come()

    def _end_beside(self) -> None:
        """End what works beside the server. May be called again."""
        if self._news is not None:
            self._news.close()
        if self._owner_watch is not None:
            self._owner_watch.close()
        if self._observer is not None and self._metrics is not None:
            self._observer.close()  # a question under way ends, and with it the thread that asked
            self._metrics.close()
        if self._tokenizers is not None:
            self._tokenizers.close()  # first: the server's end waits for what is being tokenised

    def exchange(self, fleet: FleetState) -> SchedulerNews:
        """See `Exchange.swap`: the process that started the deployment calls once a second. From the first call on this
        is the scheduler of the deployment."""
        if self._metrics is None and self._server is not None and not self._is_leaving:
            self._tell_ray()
        if self._owner_watch is not None:
            self._owner_watch.called()
        return self._exchange.swap(fleet)


def _router_options(config: EngineConfig, preprocessor: Preprocessor) -> RouterOptions:
    """How a deployment of this configuration routes."""
    return RouterOptions(
        policy=config.routing,
        block_size=preprocessor.card.layout.block_size,
        blocks_per_token=preprocessor.blocks_per_token,
        engine_queue=config.engine_queue,
        max_num_seqs=config.most_seqs,
        step_tokens=config.most_batched_tokens,
        engine_timeout_s=config.engine_timeout_s,
        forget_s=max(config.start_timeout_s, config.engine_timeout_s),
        peer_loads=not config.without_peer_loads,
        fair_prompts=config.fair_prompts,
        local_tokens=config.decode_prompt_tokens,
    )
