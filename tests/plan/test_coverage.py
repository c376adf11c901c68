"""What counts as holding a tensor exactly once, on shards made by hand."""

import pytest

from glm5.checkpoint.hf_layout import HfTensor
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.plan.coverage import Coverage
from glm5.plan.published import Part
from glm5.plan.shards import Coordinates, Shard

CONFIG = Glm5Config.from_hf_dict(tiny_config("5.2"))
FP8_CONFIG = Glm5Config.from_hf_dict(tiny_config("5.2", fp8=True))
WEIGHT = "model.layers.3.self_attn.o_proj.weight"
EXPERT = "model.layers.3.mlp.experts.5.up_proj.weight"
SHAPE = (64, 256)
RANKS = [Coordinates(pp, tp=r % 2, ep=r, etp=0) for pp in range(2) for r in range(4)]
HALVES = [Part(1, 0, 128), Part(1, 128, 256)]
WHOLE = Part(None, 0, 64)

Reads = dict[Coordinates, list[tuple[str, Part]]]


def cut(name: str = WEIGHT) -> Reads:
    """Stage 1 holds the tensor, half on each tensor-parallel rank."""
    return {at: [(name, HALVES[at.tp])] for at in RANKS if at.pp == 1}


def expert() -> Reads:
    """Expert 5 of 8 is the third rank's."""
    return {at: [(EXPERT, WHOLE)] for at in RANKS if at.pp == 1 and at.ep == 2}


def problems(reads: Reads, name: str = WEIGHT) -> list[str]:
    coverage = Coverage(CONFIG, {name: HfTensor(SHAPE, "float32")}, RANKS)
    for at in RANKS:
        coverage.add(Shard(at, {}, reads.get(at, [])))
    return list(coverage.problems())


def test_cut_whole_and_expert_tensors_are_right() -> None:
    assert problems(cut()) == []
    assert problems({at: [(WEIGHT, WHOLE)] for at in RANKS if at.pp == 0}) == []
    assert problems(expert(), EXPERT) == []


@pytest.mark.parametrize(
    "case", ["nobody", "stages", "one rank", "swapped", "gap", "both", "twice"]
)
def test_every_other_way_is_a_problem(case: str) -> None:
    reads = cut()
    last = RANKS[-1]
    if case == "nobody":
        reads = {}
    elif case == "stages":
        reads[RANKS[0]] = [(WEIGHT, HALVES[0])]
    elif case == "one rank":
        del reads[last]
    elif case == "swapped":
        reads = {at: [(WEIGHT, HALVES[1 - at.tp])] for at in reads}
    elif case == "gap":
        reads = {at: [(WEIGHT, HALVES[0])] for at in reads}
    elif case == "both":
        reads[last] = [*reads[last], (WEIGHT, WHOLE)]
    elif case == "twice":
        reads[last] = reads[last] * 2
    (problem,) = problems(reads)
    assert problem.startswith(f"{WEIGHT}: ")


def test_an_expert_belongs_to_its_own_rank_alone() -> None:
    (owner,) = expert()
    for wrong in (RANKS[-1], RANKS[4]):
        assert len(problems({wrong: [(EXPERT, WHOLE)]}, EXPERT)) == 1
    assert len(problems({owner: [(EXPERT, WHOLE)], RANKS[-1]: [(EXPERT, WHOLE)]}, EXPERT)) == 1


@pytest.mark.parametrize(("rows", "right"), [((0, 1), True), ((0, 2), False), ((1, 2), False)])
def test_the_scales_go_with_their_weight(rows: tuple[int, int], right: bool) -> None:
    """Blocks are 128 wide: the first half of 256 columns has the first of two."""
    scale = f"{WEIGHT}_scale_inv"
    tensors = {WEIGHT: HfTensor(SHAPE, "float8_e4m3fn"), scale: HfTensor((1, 2), "float32")}
    coverage = Coverage(FP8_CONFIG, tensors, RANKS)
    for at, reads in cut().items():
        part = Part(1, 1, 2) if at.tp else Part(1, *rows)
        coverage.add(Shard(at, {}, [*reads, (scale, part)]))
    assert (list(coverage.problems()) == []) == right
