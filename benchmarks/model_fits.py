"""How many requests of published models fit into a cache, and how many times as many as in pages of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from geometries import BLOCK_SIZE, Geometry, planned, published

MODEL_LENGTHS = (8192, 32768, 131072)


@dataclass(frozen=True)
class Fit:
    """A published model's cache on one rank.

    groups:       of how many members each, as text
    token_bytes:  of its cache's blocks, of a token that all groups keep
    page_tokens:  of the longest of lengthened pages: nothing shorter is found again
    requests:     by length, how many fit
    padded, lengthened: by length, how many times as many fit as in such pages
    padding:      the share of our own blocks
    """

    groups: str
    token_bytes: float
    page_tokens: int
    requests: list[int]
    padded: list[float]
    lengthened: list[float]
    padding: float

    def keys(self) -> dict[str, float]:
        """What the last line tells of it."""
        return {
            "over_padded_pages": round(min(self.padded), 3),
            "over_lengthened_pages": round(min(self.lengthened), 3),
            "padding": round(self.padding, 4),
        }


def fit_of(geometry: Geometry, pool_bytes: float, in_flight: int) -> Fit:
    """Into a pool of so many bytes, of sequences with so many tokens in steps under way."""
    cache = planned(geometry)
    plan, pages = cache.plan, cache.unified(in_flight)
    sizes = [cache.sequence_bytes(tokens, in_flight) for tokens in MODEL_LENGTHS]
    slots = sorted({group.slots for group in plan.groups})
    return Fit(
        groups=f"{len(plan.groups)}x{'/'.join(map(str, slots))}",
        token_bytes=plan.block_bytes * len(plan.groups) / BLOCK_SIZE,
        page_tokens=max(pages.page_tokens().values()),
        requests=[int(pool_bytes // size) for size in sizes],
        padded=[pages.padded_bytes(n) / size for n, size in zip(MODEL_LENGTHS, sizes, strict=True)],
        lengthened=[pages.lengthened_bytes(n) / size for n, size in zip(MODEL_LENGTHS, sizes, strict=True)],
        padding=cache.padding,
    )


def print_models(pool_bytes: float, in_flight: int) -> dict[str, dict[str, float]]:
    """The published geometries, and what the last line tells of each."""
    fits = {name: fit_of(geometry, pool_bytes, in_flight) for name, geometry in published().items()}
    print(f"\nPublished models, one rank, bfloat16: requests that fit into {pool_bytes / 1e9:.0f} GB, and how")
    print("many times as many as in pages of one layer, padded to the largest / lengthened to so many tokens")
    print(
        f"{'model':20}{'groups':>10}{'bytes/token':>12}{'padding':>9}{'page':>7}"
        + "".join(f"{n:>24,}" for n in MODEL_LENGTHS)
    )
    for name, fit in fits.items():
        cells = zip(fit.requests, fit.padded, fit.lengthened, strict=True)
        text = "".join(f"{count:>9} {f'{padded:.2f} / {longer:.2f}':>14}" for count, padded, longer in cells)
        print(f"{name:20}{fit.groups:>10}{fit.token_bytes:>12,.0f}{fit.padding:>9.1%}{fit.page_tokens:>7,}{text}")
    return {name: fit.keys() for name, fit in fits.items()}
