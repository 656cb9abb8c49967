import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.jobs.models import GPT, CausalSelfAttention, GPTShape, LinesNet, SmallCNN, mlp

TINY = GPTShape(num_layers=2, width=16, head_dim=4, context=12)


def test_an_mlp_has_a_relu_between_any_two_layers_and_none_at_the_end():
    assert [type(layer) for layer in mlp(3, 5, 2)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert mlp(3, 5, 2)(torch.zeros(4, 3)).shape == (4, 2)


def test_every_model_is_traced_by_torch_export_and_the_trace_computes_the_same():
    cases = (
        (SmallCNN(width=2), torch.randn(3, 1, 8, 8)),
        (LinesNet(4, num_rows=50, width=3), torch.randint(0, 50, (3, 7))),
        (GPT(TINY), torch.randint(0, 256, (3, 12))),
    )
    for model, x in cases:
        model.eval()
        traced = torch.export.export(model, (x,)).module()
        assert torch.equal(traced(x), model(x))


def test_the_output_layer_of_a_gpt_is_its_token_embedding_also_after_training():
    model = GPT(TINY)
    tokens = torch.randint(0, 256, (2, 12))
    before = model.tok.weight.detach().clone()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.head.weight is model.tok.weight
    assert not torch.equal(model.head.weight, before)
    assert "head.weight" not in dict(model.named_parameters())


def test_a_gpt_does_not_look_ahead():
    model = GPT(TINY).eval()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 256
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 5


def test_a_fresh_gpt_knows_nothing_and_claims_nothing():
    model = GPT(GPTShape(num_layers=2))
    tokens = torch.randint(0, 256, (4, 129))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert 5.5 < loss < 6.5  # a uniform guess among 256 costs 5.55


def test_attention_split_by_columns_is_the_sum_of_its_halves():
    whole = CausalSelfAttention(width=16, head_dim=4).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rows in (slice(0, 8), slice(8, 16)):
        half = CausalSelfAttention(width=16, head_dim=4).double()
        for name in ("q", "k", "v"):
            layer = getattr(whole, name)
            column = nn.Linear(16, 8, bias=layer.bias is not None, dtype=torch.float64)
            column.weight = nn.Parameter(layer.weight[rows])
            if layer.bias is not None:
                column.bias = nn.Parameter(layer.bias[rows])
            setattr(half, name, column)
        half.proj = nn.Linear(8, 16, bias=False, dtype=torch.float64)
        half.proj.weight = nn.Parameter(whole.proj.weight[:, rows])
        total += half(x)
    assert torch.allclose(total + whole.proj.bias, whole(x), rtol=1e-12, atol=1e-12)


def test_dropout_is_applied_to_the_embeddings_and_both_branches_of_every_block():
    model = GPT(GPTShape(num_layers=3, width=16, head_dim=4, dropout=0.25))
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25] * 7
    tokens = torch.randint(0, 256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_padding_does_not_change_what_a_line_is():
    model = LinesNet(4, num_rows=50, width=3)
    features = torch.tensor([[5, 9, 0, 0], [5, 9, 5, 9]])
    out = model(features)
    assert torch.allclose(out[0], out[1])
    assert torch.equal(out[:1], model(features[:1, :3]))


def test_a_batch_touches_only_the_rows_of_the_table_that_it_names():
    model = LinesNet(4, num_rows=50, width=3)
    model(torch.tensor([[5, 9, 0]])).sum().backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.layout == torch.strided
    assert gradient.abs().sum(dim=1).nonzero().flatten().tolist() == [5, 9]


def test_an_image_batch_of_one_can_be_trained_on():
    model = SmallCNN(width=2)
    model(torch.randn(1, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
