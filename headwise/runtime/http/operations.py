"""Operations on the deployment over HTTP, for operators: other adapters, other weights, sleep, an empty cache.

Where vLLM has an endpoint for it the path, the fields and what is answered are vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.runtime.client.client import Client
from headwise.runtime.http.bodies import parse
from headwise.runtime.http.deployment_metrics import DeploymentView
from headwise.runtime.http.errors import ApiError, invalid
from headwise.runtime.http.guard import tenant_of

Found = TypeVar("Found")
Endpoint = Callable[[Request], Awaitable[Response]]

_ASLEEP = ("falling asleep", "asleep", "waking")
_TIERS = ("device", "host", "storage", "all")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LoadBody(_Body):
    """load_inplace: whether one that has its name goes for it; else that is an error"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(_Body):
    """lora_int_id: says nothing here"""

    lora_name: str
    lora_int_id: int | None = None


class WeightsBody(_Body):
    """See `Client.update_weights`."""

    model: str = ""
    version: str = ""
    keep_running: bool = False
    adapters: dict[str, str] | None = None
    add_adapters: dict[str, str] | None = None
    drop_adapters: list[str] = []


class Operations:
    """The endpoints. A tenant's key is refused. What is asked for is done one after the other.

    read:    a request's body
    changed: called once weights or adapters have been
    """

    def __init__(
        self,
        client: Client,
        view: DeploymentView,
        read: Callable[[Request], Awaitable[bytes]],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._client, self._view, self._read, self._changed = client, view, read, changed
        self._one_at_a_time = asyncio.Lock()
        self.routes: dict[str, tuple[str, Endpoint]] = {
            "/v1/load_lora_adapter": ("POST", self.load_adapter),
            "/v1/unload_lora_adapter": ("POST", self.unload_adapter),
            "/update_weights": ("POST", self.update_weights),
            "/sleep": ("POST", self.sleep),
            "/wake_up": ("POST", self.wake_up),
            "/is_sleeping": ("GET", self.is_sleeping),
            "/reset_prefix_cache": ("POST", self.reset_prefix_cache),
        }

    async def load_adapter(self, request: Request) -> Response:
        body = await self._body(request, LoadBody)
        self._view.expire()
        if not body.load_inplace and body.lora_name in (await self._view.stats())["weights"]["adapters"]:
            raise invalid(
                f"there is an adapter {body.lora_name!r:.80} already: give load_inplace: true to have this one in its "
                "place",
                "lora_name",
            )
        await self._update(add_adapters={body.lora_name: body.lora_path})
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        body = await self._body(request, UnloadBody)
        self._view.expire()
        if body.lora_name not in (await self._view.stats())["weights"]["adapters"]:
            raise ApiError(404, f"there is no adapter {body.lora_name!r:.80}", param="lora_name", code="not_found")
        await self._update(drop_adapters=[body.lora_name])
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def update_weights(self, request: Request) -> Response:
        body = await self._body(request, WeightsBody)
        return JSONResponse({"version": await self._update(**body.model_dump())})

    async def sleep(self, request: Request) -> Response:
        """Whatever ``level`` says: weights go, and what is cached goes to the host."""
        _check_operator(request)
        await self._do(self._client.sleep)
        return Response()

    async def wake_up(self, request: Request) -> Response:
        _check_operator(request)
        await self._do(self._client.wake)
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        """Whether some engine does, or is about to."""
        _check_operator(request)
        self._view.expire()
        engines = (await self._view.stats())["engines"].values()
        return JSONResponse({"is_sleeping": any(engine.get("state") in _ASLEEP for engine in engines)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """``?tier=`` device, host, storage, or all, as it is without."""
        _check_operator(request)
        tier = request.query_params.get("tier", "all")
        if tier not in _TIERS:
            raise invalid(f"tier must be one of {', '.join(_TIERS)}, got {tier!r:.80}", "tier")
        return JSONResponse({"blocks": await self._do(lambda: self._client.reset_cache(tier))})

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        _check_operator(request)
        return parse(kind, await self._read(request))

    async def _update(self, **asked: Any) -> str:
        """Who asks for a new adapter next finds it."""
        try:
            return await self._do(lambda: self._client.update_weights(**asked))
        finally:
            self._view.expire()
            await self._changed()

    async def _do(self, operation: Callable[[], Found]) -> Found:
        """Raises `ApiError` for what cannot be had; other errors are the deployment's."""
        async with self._one_at_a_time:
            try:
                return await asyncio.to_thread(operation)
            except (ConfigError, ModelError, InvalidRequestError) as error:
                raise invalid(str(error), None) from None


def _check_operator(request: Request) -> None:
    if tenant_of(request) is not None:
        why = "operations are for operators: a tenant's key may not ask for them"
        raise ApiError(403, why, kind="permission_error", code="not_allowed")
