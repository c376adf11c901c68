"""Layouts as text, and which ones a model and a number of GPUs allow."""

import pytest

from glm5.errors import LayoutError
from glm5.plan.layouts import parse_layout, place, smallest_world, valid_placements
from glm5.plan.models import read_model
from glm5.runtime.distributed import Layout

GLM52 = read_model("GLM-5.2")[1]


def test_a_layout_is_its_axes_in_any_order() -> None:
    assert parse_layout("ep=32, tp=8,pp=4") == Layout(tp=8, pp=4, ep=32)
    assert parse_layout("cp=2") == Layout(cp=2)


@pytest.mark.parametrize(
    "text", ["", "tp", "tp=0", "tp=-1", "tp=2,tp=2", "dp=2", "tp=2;pp=2", "tp=x"]
)
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(LayoutError, match="this is not a layout"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [(Layout(tp=8, pp=8, ep=32), 256), (Layout(tp=8), 8), (Layout(cp=6, ep=4), 12), (Layout(), 1)],
)
def test_the_smallest_world(layout: Layout, gpus: int) -> None:
    assert smallest_world(layout) == gpus
    place(GLM52, layout, gpus)
    for fewer in range(1, gpus):
        with pytest.raises(LayoutError, match="does not divide the processes"):
            place(GLM52, layout, fewer)


@pytest.mark.parametrize(
    ("layout", "split", "text"),
    [
        (Layout(tp=3), None, "num_attention_heads"),
        (Layout(ep=3), None, "n_routed_experts"),
        (Layout(etp=3), None, "moe_intermediate_size does not divide"),
        (Layout(vpp=2), None, "cannot be interleaved on one pipeline rank"),
        (Layout(pp=22), None, "at most 21"),
        (Layout(pp=11, vpp=2), None, "at most 21"),
        (Layout(pp=4), (20, 20), "4 positive numbers that add up to 78"),
        (Layout(pp=4), (20, 20, 20, 18), "starts on layer 20, which shares"),
    ],
)
def test_bad_layouts_say_what_training_would(
    layout: Layout, split: tuple[int, ...] | None, text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        place(GLM52, layout, smallest_world(layout), split)
    assert text in str(caught.value)


def test_all_listed_layouts_are_valid_and_different() -> None:
    found = list(valid_placements(GLM52, 16))
    assert len({placed.layout for placed in found}) == len(found)
    for placed in found:
        layout = placed.layout
        assert placed == place(GLM52, layout, 16)
        assert placed.dp * layout.tp * layout.pp * layout.cp == 16
        assert placed.expert_copies * layout.ep * layout.pp == 16
        assert sum(placed.layers_per_stage) == 78
        assert len(placed.layers_per_stage) == layout.pp * layout.vpp
    assert {placed.layout.tp for placed in found} == {1, 2, 4, 8}
    assert {placed.layout.pp for placed in found} == {1, 2, 4, 8, 16}
    # 16 ranks of two stages would need more than the 21 layers that a stage can start on
    assert {p.layout.pp for p in found if p.layout.vpp == 2} == {2, 4, 8}


def test_chunks_in_flight() -> None:
    """Megatron-Core's 1F1B schedules: of the first rank the most."""
    plain = place(GLM52, Layout(pp=4, tp=2), 8)
    assert [plain.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    interleaved = place(GLM52, Layout(pp=4, vpp=2, tp=2), 8)
    assert [interleaved.in_flight(rank) for rank in range(4)] == [11, 9, 7, 5]
