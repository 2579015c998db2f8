"""An engine without a model that says what it is asked."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from support.engine.scripted import ScriptedCore

from headwise.runtime.engine.output import OutputText
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta, Usage


class ByteDetokenizer:
    """Tokens are bytes of UTF-8: a character is cut at each of its bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def push(self, tokens: list[int]) -> str:
        return self._decoder.decode(bytes(tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    eos_token_ids = ()

    def detokenizer(self, shown_tokens: tuple[str, ...]) -> ByteDetokenizer:
        return ByteDetokenizer()


@dataclass
class Output:
    request: GenerateRequest
    text: OutputText
    told: int = 0


class RepeatingCore(ScriptedCore):
    """Answers a prompt's text with itself, a few bytes a step as ``pace`` says, and ends it as an engine does.

    ends: how an answer ends whose text is told; a stop string ends it before
    seen: the last request
    """

    def __init__(self) -> None:
        super().__init__()
        self.pace = [1]
        self.ends = FinishReason.LENGTH
        self.seen: GenerateRequest | None = None
        self._outputs: dict[str, Output] = {}

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        self.seen = request
        self._outputs[request.request_id] = Output(request, OutputText(ByteTokenizer(), request.sampling))

    def _next(self, request_id: str) -> OutputDelta:
        output = self._outputs[request_id]
        data = "".join(map(chr, output.request.prompt_token_ids)).encode()
        step = data[output.told :][: self.pace[self.steps % len(self.pace)]]
        text, reason = "", None
        for token in step:
            output.told += 1
            more, reason = output.text.push(token)
            text += more
            if reason is not None:
                break
        if reason is None and output.told == len(data):
            text, reason = text + output.text.flush(), self.ends
        if reason is None:
            return OutputDelta(request_id, tuple(step), text)
        stop = output.text.stopped_by
        del self.live[request_id], self._outputs[request_id]
        usage = Usage(len(output.request.prompt_token_ids), 0, output.told)
        return OutputDelta(request_id, tuple(step), text, finish_reason=reason, usage=usage, stop=stop)
