from __future__ import annotations

import ray.exceptions

from headwise.actors.calls import cause_of
from headwise.errors import DeploymentError, ModelError


def test_the_cause_of_an_actor_s_death_is_one_line_without_ray_s_guesses() -> None:
    error = ray.exceptions.RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: Engine\n\tpid: 12\n"
        "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit "
        "detail: killed. Some common causes include: (1) the process was killed by the OOM killer"
    )
    assert cause_of(error) == (
        "its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: killed"
    )


def test_that_an_actor_was_killed_for_memory_is_said_and_not_how_to_configure_ray() -> None:
    """As Ray 2.60 and earlier releases tell it, each on a page of its own."""
    error = ray.exceptions.OutOfMemoryError(
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: bc43) "
        "was 4.79GB used / 23.54GB limit (0.203357)\nOOM kill reason: Memory usage 5057495040B exceeded threshold\n"
        "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n12763\t0.64\tray::Worker\nRefer to the documentation on how to"
    )
    assert cause_of(error) == (
        "Ray killed it for memory (OOM), which its node had too little of: 4.79GB used / 23.54GB limit"
    )
    before = ray.exceptions.OutOfMemoryError(
        "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.2, ID: bc43) where the "
        "task (actor ID: 92, name=Engine.__init__, pid=9, memory used=1.21GB) was running was 15.3GB / 15.9GB (0.96), "
        "which exceeds the memory usage threshold of 0.95. Ray killed this worker.\nRefer to the documentation"
    )
    assert cause_of(before).endswith(": 15.3GB / 15.9GB")
    assert cause_of(ray.exceptions.OutOfMemoryError("told otherwise")).startswith("Ray killed it for memory (OOM)")


def test_the_cause_of_an_actor_whose_node_died_is_that() -> None:
    error = ray.exceptions.RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: Engine\n\tip: 10.0.0.5\n"
        "The actor died because its node has died. Node Id: 12ab"
    )
    assert cause_of(error) == "The actor died because its node has died. Node Id: 12ab"


def test_the_cause_of_an_actor_that_was_never_made_is_what_its_making_raised() -> None:
    error = ray.exceptions.RayActorError(
        error_msg="The actor died because of an error raised in its creation task, ray::Store.__init__() (pid=1)\n"
        '  File "store.py", line 1, in __init__\nzmq.error.ZMQError: Address already in use\n'
    )
    assert cause_of(error) == "zmq.error.ZMQError: Address already in use"


def test_the_cause_of_what_an_actor_raised_is_its_own_words() -> None:
    raised = ModelError("there is no model at /nowhere\nand more")
    error = ray.exceptions.RayTaskError("ended", "Traceback ...", raised)
    assert cause_of(error) == "there is no model at /nowhere"
    assert "KeyError('x')" in cause_of(ray.exceptions.RayTaskError("ended", "Traceback ...", KeyError("x")))


def test_a_cause_has_no_thousand_words() -> None:
    assert len(cause_of(DeploymentError("word " * 5000))) < 500
