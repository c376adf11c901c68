"""The steps of a conversion cover every rule once, and put one expert of every rank together."""

import pytest

from glm5 import Glm5Config
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.tiny import tiny_config
from glm5.integrations.bridge.plan import conversion_steps, expert_rule_name, grouped_name


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_every_rule_is_in_one_step(variant: str, ep_size: int) -> None:
    config = Glm5Config.from_hf_dict(tiny_config(variant))
    rules = glm5_rules(config, include_mtp=True)
    steps = conversion_steps(rules, config.n_routed_experts, ep_size)
    planned = [rule.mcore_name for step in steps for rule in step.rules]
    assert sorted(planned) == sorted(rule.mcore_name for rule in rules)
    assert {len(step.rules) for step in steps} == {1, ep_size}


def test_ranks_have_the_experts_of_their_share() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5"))
    steps = conversion_steps(glm5_rules(config, include_mtp=False), 8, 4)
    name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    (step,) = (step for step in steps if step.rules[0].mcore_name == name)
    assert step.hf_names == [
        f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (1, 3, 5, 7)
    ]
    assert [step.rule_of(rank) for rank in range(4)] == list(step.rules)


def test_a_tensor_of_all_ranks_has_one_rule() -> None:
    config = Glm5Config.from_hf_dict(tiny_config("5"))
    first = conversion_steps(glm5_rules(config, include_mtp=False), 8, 4)[0]
    assert [first.rule_of(rank) for rank in range(4)] == [first.rules[0]] * 4


def test_names_of_grouped_experts() -> None:
    rule = "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.12.linear_fc1.weight"
    grouped = "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight12"
    assert (grouped_name(rule), expert_rule_name(grouped)) == (grouped, rule)
    for other in ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight"):
        assert (grouped_name(other), expert_rule_name(other)) == (other, other)
