"""The face: the user's optimizer as ranks see it."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.runtime.optimizer_spec import ELEMENTWISE_OPTIMIZERS, OptimizerSpec, squared_norm


def params():
    return {"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.zeros(2))}


def grouped(found):
    return optim.AdamW([{"params": [found["bias"]], "weight_decay": 0.0}, {"params": [found["weight"]], "lr": 0.5}])


def test_groups_are_known_by_the_names_of_their_parameters():
    found = params()
    face = OptimizerSpec(grouped(found), found)
    assert face.group_index == {"bias": 0, "weight": 1}
    assert face.options(1)["lr"] == 0.5
    assert "params" not in face.options(1)


def test_an_optimizer_over_other_tensors_takes_the_options_of_their_groups():
    found = params()
    face = OptimizerSpec(grouped(found), found)
    made = face.build([(1, torch.zeros(4)), (0, torch.zeros(1)), (1, torch.zeros(3))])
    assert type(made) is optim.AdamW
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in made.param_groups] == [
        (0.5, 0.01, 2),
        (0.001, 0.0, 1),
    ]


def test_what_a_scheduler_does_to_the_face_reaches_every_optimizer_made_from_it():
    found = params()
    face = OptimizerSpec(grouped(found), found)
    made = face.build([(1, torch.zeros(4)), (0, torch.zeros(1))])
    optim.lr_scheduler.LambdaLR(face.optimizer, lambda _: 0.1)
    face.sync_options(made)
    assert [group["lr"] for group in made.param_groups] == [0.05, 0.0001]


def test_a_factory_gets_the_trainable_parameters_only():
    found = params()
    found["bias"].requires_grad_(False)
    assert OptimizerSpec(partial(optim.SGD, lr=0.1), found).group_index == {"weight": 0}


def test_only_optimizers_known_to_treat_numbers_apart_may_have_parameters_joined():
    """A class of the user's own may look at anything, also where it descends from one that does not."""

    class Own(optim.SGD):
        pass

    assert OptimizerSpec(partial(optim.AdamW), params()).is_elementwise
    assert not OptimizerSpec(partial(Own, lr=0.1), params()).is_elementwise
    assert not OptimizerSpec(partial(optim.Adafactor), params()).is_elementwise


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE_OPTIMIZERS, key=str), ids=str)
def test_every_optimizer_said_to_treat_numbers_apart_does(kind):
    """Two parameters updated as one tensor, or one as two, come out bit for bit as apart."""
    draw = torch.Generator().manual_seed(0)
    values, gradients = (torch.randn(3, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    joined = [nn.Parameter(values[0].clone())]
    apart = [nn.Parameter(values[0][:3].clone()), nn.Parameter(values[0][3:].clone())]
    one, two = kind(joined, lr=0.1), kind(apart, lr=0.1)
    for gradient in gradients:
        joined[0].grad, apart[0].grad, apart[1].grad = gradient.clone(), gradient[:3].clone(), gradient[3:].clone()
        one.step()
        two.step()
    assert torch.allclose(joined[0], torch.cat([*apart]), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda found: optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
            "^the optimizer holds 1 tensor that the model does",
        ),
        (
            lambda found: optim.SGD([found["bias"]], lr=0.1),
            "^the optimizer does not hold weight; give it all trainable",
        ),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(make, text):
    found = params()
    with pytest.raises(PlanError, match=text):
        OptimizerSpec(make(found), found)


def test_the_norm_is_added_up_without_overflow_and_over_sparse_gradients():
    dense = torch.tensor([3.0, 4.0])
    assert squared_norm([dense, dense.to_sparse()]) == 50.0
    assert squared_norm([torch.full((4,), 300.0, dtype=torch.float16)]) == pytest.approx(360_000)


class Own(optim.SGD):
    """Keeps an argument that is not in its defaults."""

    def __init__(self, params, lr=0.1, *, factor=2):
        super().__init__(params, lr=lr)
        self.factor = factor


class Secret(optim.SGD):
    def __init__(self, params, lr=0.1, *, factor=2):
        super().__init__(params, lr=lr)
        self._times = factor


def with_one_lr(given):
    return Secret([{"params": [one for one in given if one.requires_grad], "lr": 0.5}], factor=20)


@pytest.mark.parametrize("factory", [partial(Secret, factor=20), with_one_lr])
def test_the_ranks_optimizers_are_made_by_the_users_factory(factory):
    """They were made with what the defaults hold, so that the factor was lost under solo, too."""
    made = OptimizerSpec(factory, params()).build([(0, nn.Parameter(torch.zeros(4), requires_grad=False))])
    assert vars(made)["_times"] == 20
    assert not made.param_groups[0]["params"][0].requires_grad


def test_groups_given_to_a_factory_keep_their_options():
    found = params()
    face = OptimizerSpec(lambda given: Secret(split(list(given)), factor=20), found)
    made = face.build([(1, torch.zeros(4)), (0, torch.zeros(1))])
    assert vars(made)["_times"] == 20
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.1]


def split(given):
    """Return groups as they are, or a group for each tensor with a learning rate of its own."""
    rates = (0.1, 0.5)
    return [
        one if isinstance(one, dict) else {"params": [one], "lr": lr} for one, lr in zip(given, rates, strict=False)
    ]


def test_an_optimizer_object_is_made_again_with_the_arguments_that_it_shows():
    found = params()
    assert OptimizerSpec(Own(found.values(), factor=20), found).build([(0, torch.zeros(4))]).__dict__["factor"] == 20


def changed(optimizer):
    optimizer.nesterovian = 3
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda found: Secret(found), "^Secret keeps its factor neither in its defaults nor .* pass a factory that"),
        (lambda found: changed(Own(found)), "^Own has nesterovian=3, but one made again, .* has None; pass a factory"),
    ],
)
def test_an_optimizer_that_the_ranks_cannot_make_again_is_refused(make, text):
    found = params()
    with pytest.raises(PlanError, match=text):
        OptimizerSpec(make(list(found.values())), found)


@pytest.mark.parametrize(("given", "text"), [("adam", "is 'adam'"), (lambda _: None, "makes a NoneType")])
def test_what_makes_no_optimizer_is_refused(given, text):
    with pytest.raises(PlanError, match=f"^the optimizer {text}; give a torch optimizer .* or a factory of one such"):
        OptimizerSpec(given, params())


@pytest.mark.parametrize("kind", [partial(optim.SGD, momentum=0.9), optim.Adagrad], ids=["SGD", "Adagrad"])
def test_an_optimizer_that_has_stepped_is_refused_because_its_state_would_be_lost(kind):
    found = params()
    used = kind(found.values(), lr=0.1)
    face = OptimizerSpec(used, found)
    for param in found.values():
        param.grad = torch.ones_like(param)
    used.step()
    with pytest.raises(PlanError, match=r"^the optimizer has state for 2 parameters already, .* pass one that has not"):
        OptimizerSpec(used, found)
    used.load_state_dict(used.state_dict())
    with pytest.raises(PlanError, match=r"^the optimizer has state for 2 parameters already"):
        face.build([(0, torch.zeros(4))])


def test_who_asks_for_the_state_of_the_face_is_told_where_it_is():
    face = OptimizerSpec(partial(optim.Adam), params())
    assert face.optimizer.state_dict()["state"] == {}
    face.after_step()
    with pytest.warns(UserWarning, match=r"^state_dict\(\) has the optimizer's options but not its state, .* save a"):
        face.optimizer.state_dict()
