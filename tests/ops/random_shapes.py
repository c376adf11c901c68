"""How tests draw random shapes for kernels that run in Triton's interpreter."""

from hypothesis import HealthCheck, Phase, settings


def random_shapes(count: int) -> settings:
    """The same `count` examples in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # to shrink takes minutes in the interpreter
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
