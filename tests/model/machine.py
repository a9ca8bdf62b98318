"""Runs a state machine through random histories; of a failure it prints all the steps and how to meet it again."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_histories(machine: type[RuleBasedStateMachine], max_examples: int, num_steps: int) -> None:
    """Reports the first failure as it was found: to shrink it takes hypothesis up to five minutes.

    The ``@reproduce_failure`` that it prints goes above the class of the machine. Where the failure was met, it is
    in hypothesis's database too: run the test again there, without `phases`, and it is shrunk.
    """
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            phases=[Phase.reuse, Phase.generate],
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
