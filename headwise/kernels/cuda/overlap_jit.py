"""`overlap.cuh` in Triton."""
# mypy: ignore-errors

import triton.language as tl
from triton.runtime.jit import JITFunction

WAIT = tl.constexpr("griddepcontrol.wait; // $0")
LAUNCH = tl.constexpr("griddepcontrol.launch_dependents; // $0")


@JITFunction
def wait_for_earlier():
    """Until all that was launched before has ended, and what it wrote can be read."""
    tl.inline_asm_elementwise(WAIT, "=r", [], tl.int32, False, 1)


@JITFunction
def let_next_begin():
    """The next kernel may begin once each program of this one has said so, or ended."""
    tl.inline_asm_elementwise(LAUNCH, "=r", [], tl.int32, False, 1)
