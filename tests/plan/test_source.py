"""Plan files, edited by hand: every mistake is reported with its line, when the file is read and later."""

import pytest

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.model_profile import format_profile
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import PlanSource
from counterpoint.planner.ranking import predict_plan
from counterpoint.world.cluster import Cluster
from tests.model.profiles import build_profile, layer_profile

EDITED = "plan:\n  strategy: {strategy}\n  num_microbatches: {micros}\n  passes:\n  - {passed}\nnum_ranks: {ranks}\n"


def edited(strategy="pipeline(2) * data(2)", micros=4, passed="overlap", ranks=4):
    return EDITED.format(strategy=strategy, micros=micros, passed=passed, ranks=ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan: [\n", "plan.yaml:2: the plan file is not YAML"),
        ("plans:\n  strategy: solo\n", "plan.yaml:1: a plan file has 'plan:'"),
        ("plan:\n  passes: []\n", "plan.yaml:1: a plan file has 'plan:' with 'strategy:'"),
        (
            "plan:\n  strategy: solo\nranks: 2\n",
            "plan.yaml:3: a plan file has no key 'ranks'; its keys are plan,",
        ),
        ("plan:\n  strategy: solo\n  stratgy: solo\n", "plan.yaml:3: a plan has no key 'stratgy'; its keys are"),
        (
            "plan:\n  strategy: solo\n  strategy: data(2)\n",
            "plan.yaml:2: strategy is given here and in line 3; give it",
        ),
        (edited(strategy="datta(4)"), "plan.yaml:2: there is no strategy 'datta'; did you mean data?"),
        (edited(strategy="pipeline(2) * pipeline(2)"), "plan.yaml:2: pipeline(2) * pipeline(2) has 2 pipelines,"),
        (edited(micros="many"), "plan.yaml:3: num_microbatches must be a whole number"),
        (edited(micros=0), "plan.yaml:3: a plan needs at least 1 microbatch, not 0"),
        (edited(passed="fast"), "plan.yaml:4: there is no pass 'fast'; the passes are overlap, recompute"),
        (edited(ranks=8), "plan.yaml:6: num_ranks is 8, but pipeline(2) * data(2) in plan.yaml:2 needs 4; change the"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_line(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text, "plan.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "pipeline(8)", "ranks": 8}, "plan.yaml:2: the pipeline has 8 stages, but the model has only 4"),
        ({"strategy": "tensor(3)", "ranks": 3}, "plan.yaml:2: tensor(3) cannot shard hidden of block0: 256 is not"),
        ({"passed": "recompute:*.attn"}, "plan.yaml:4: no block of the model matches recompute:*.attn"),
    ],
)
def test_a_plan_that_a_model_does_not_go_along_with_is_refused_with_the_line(changes, message):
    plan = Plan.from_yaml(edited(**changes), "plan.yaml")
    with pytest.raises(PlanError) as caught:
        compile(plan, linear_chain(4))
    assert str(caught.value).startswith(message)


def test_unsuitable_ranks_and_batches_are_reported_with_the_lines_of_the_plan():
    plan = Plan.from_yaml(edited(), "plan.yaml")
    with pytest.raises(PlanError, match=r"^plan\.yaml:2: pipeline\(2\) \* data\(2\) needs 4 ranks"):
        plan.require_ranks(3)
    with pytest.raises(PlanError, match=r"^plan\.yaml:3: a batch of 9 samples cannot be"):
        plan.require_batch(9)


def test_a_broken_rule_is_reported_with_its_number_and_the_line():
    with pytest.raises(ProgramError) as caught, PlanSource("plan.yaml", (("strategy", 2),)).error_at("strategy"):
        raise ProgramError("a gradient is missing", rule=6)
    assert str(caught.value) == "plan.yaml:2: verifier rule 6 violated: a gradient is missing"
    assert caught.value.rule == 6


def test_the_line_of_a_plan_is_reported_once():
    written = PlanSource("plan.yaml", (("strategy", 2), ("passes", 4)))
    with pytest.raises(PlanError) as caught, written.error_at("strategy"), written.error_at("passes"):
        raise PlanError("no such block")
    assert str(caught.value) == "plan.yaml:4: no such block"


def test_where_a_plan_was_written_is_no_part_of_what_it_is():
    assert Plan.from_yaml(edited(), "plan.yaml") == Plan.from_yaml(edited())
    assert Plan.from_yaml(edited()).to_yaml() == edited()


def test_a_file_is_read_from_its_path_or_refused_with_it(tmp_path):
    (tmp_path / "plan.yaml").write_text(edited())
    assert str(Plan.from_file(tmp_path / "plan.yaml")) == "pipeline(2) * data(2)"
    with pytest.raises(PlanError, match=r"none\.yaml cannot be read: No such file or directory; give an existing file"):
        Plan.from_file(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"bytes\.yaml is not UTF-8 text"):
        Plan.from_file(tmp_path / "bytes.yaml")


TIMED = linear_chain(3, width=8)
TIMING = build_profile(TIMED, [layer_profile(6.0, 12.0), layer_profile(1.0, 2.0), layer_profile(2.0, 4.0)])


def kept(folder, plan):
    """The plan as it is read from a file beside which its profile stands."""
    (folder / "t.json").write_text(format_profile(TIMING), encoding="utf-8")
    (folder / "plan.yaml").write_text(plan.to_yaml("t.json"), encoding="utf-8")
    return Plan.from_file(folder / "plan.yaml")


def test_a_plan_with_its_profile_is_predicted_as_before_where_it_is_read_again(tmp_path):
    plan = Plan.parse("pipeline(2)", num_microbatches=2)
    result = predict_plan(plan, TIMED, Cluster(), batch_size=4, profile=TIMING)
    assert predict_plan(kept(tmp_path, result.plan), TIMED, Cluster(), batch_size=4) == result
    assert str(result.plan) == "pipeline(2, balance=(1,2))"


def test_a_plan_with_the_profile_of_another_model_is_refused_with_its_line_and_what_differs(tmp_path):
    plan = kept(tmp_path, Plan.parse("pipeline(2)", num_microbatches=2))
    with pytest.raises(PlanError) as caught:
        predict_plan(plan, linear_chain(3, width=4), Cluster(), batch_size=4)
    assert str(caught.value).startswith(f"{tmp_path}/plan.yaml:6: the profile is of Chain, but this is another model")
    assert "it has block0.weight with 256 bytes, where this model has block0.weight with 64" in str(caught.value)


def test_a_missing_profile_is_reported_with_the_line_that_names_it(tmp_path):
    (tmp_path / "plan.yaml").write_text(Plan.parse("data(2)").to_yaml("gone.json"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"plan.yaml:6: .*gone.json cannot be read: No such file or directory; give"):
        Plan.from_file(tmp_path / "plan.yaml")


def test_an_earlier_key_is_refused_with_its_present_name():
    with pytest.raises(
        PlanError, match=r"^plan\.yaml:3: a plan file has no key 'timing'.*; timing is now called profile$"
    ):
        Plan.from_yaml("plan:\n  strategy: solo\ntiming: t.json\n", "plan.yaml")
