"""Checks a request that came over the wire, beyond the types of its fields."""

from __future__ import annotations

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.prompt_items import MAX_ITEMS, check_places
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

MAX_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 1024
MAX_TENANT_CHARACTERS = 64


def check_request(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError` naming what is wrong and what is allowed. Cheap: only looks at each token."""
    if not 0 < len(request.request_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"a request id must have 1 to {MAX_ID_CHARACTERS} characters")
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if prompt.ndim != 1:
        raise InvalidRequestError(f"prompt_token_ids must be one row, got shape {prompt.shape}")
    if prompt.size and int(prompt.min()) < 0:
        raise InvalidRequestError(f"prompt_token_ids must not be negative, got {prompt.min()}")
    if output and not 0 <= min(output) <= max(output) < 2**31:
        raise InvalidRequestError("output_token_ids must be from 0 to 2**31 - 1")
    if not 0 <= request.prompt_told <= len(prompt):
        raise InvalidRequestError(f"prompt_told must be from 0 to the prompt's {len(prompt)} tokens")
    check_one_sample(request.sampling)
    _check_identity(request)


def check_one_sample(sampling: SamplingParams) -> None:
    """Raise `InvalidRequestError` for parameters of several samples: those are as many requests."""
    if sampling.n != 1:
        raise InvalidRequestError(
            f"n is {sampling.n}, but a chat or stream is one sample: call generate, or open a stream for each of "
            "SamplingParams.samples()"
        )


def _check_identity(request: GenerateRequest) -> None:
    """Check what identifies cached blocks besides their tokens."""
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequestError(
            f"a cache_salt has {len(request.cache_salt)} characters; at most {MAX_SALT_CHARACTERS} are allowed"
        )
    if len(request.tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidRequestError(
            f"a tenant's name has {len(request.tenant)} characters; at most {MAX_TENANT_CHARACTERS} are allowed"
        )
    if len(request.lora_id) > MAX_SALT_CHARACTERS:
        raise InvalidRequestError(
            f"a lora_id has {len(request.lora_id)} characters; at most {MAX_SALT_CHARACTERS} are allowed"
        )
    if len(request.extra_keys) > MAX_ITEMS:
        raise InvalidRequestError(f"{len(request.extra_keys)} items were given; at most {MAX_ITEMS} are allowed")
    check_places(request.extra_keys, request.prompt_token_ids.size)
