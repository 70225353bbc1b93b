"""Tensors of several runs as one, so that the code of one run trains all of them at once; and their batches."""

# ruff: noqa: ARG001  (all rules have one signature)

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from vflsec.base.errors import NotStackable
from vflsec.base.seeds import Generators

VECTOR = 16
"""Optimizers round the entries of a tensor beyond a multiple of so many in another way."""

TRIALS = 5
"""Random products of which all must have the same bits before products of their shapes are computed at once."""


class Stacked(Tensor):
    """R tensors of one shape, one for each run.

    It has the shape of one of them. Every operation acts on each run by itself, and its result is a ``Stacked`` tensor
    again; plain tensors among its arguments are the same for all runs. No run's gradient depends on another run.

    Common operations act on the memory of all runs at once, in general with the rounding of an operation on one run.
    ``benchmarks/stacked.py`` compares it with ``torch.func``: on one core training 3 to 20 small networks takes 0.2
    to 0.9 of the time of one after the other, with the same bits; ``vmap`` takes 1.1 to 1.4 times as long as this, with
    other bits.

    All others go from run to run. What is no tensor, such as ``float(x)``, must be the same for all runs; if it is not,
    if shapes differ, or if runs would write to the same plain tensor, ``NotStackable`` is raised.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply an operation of torch to each run."""
        rule, kwargs = _RULES.get(func), kwargs or {}
        with torch._C.DisableTorchFunction():
            if rule is None:
                rule = _access if func.__name__ in _ATTRIBUTES else _run_by_run
            result = rule(func, args, kwargs)
            return _run_by_run(func, args, kwargs) if result is NotImplemented else result

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, without the data."""
        return f"Stacked({len(split_runs(self))} runs of {tuple(self.shape)})"


def stack(parts: Sequence[Tensor]) -> Stacked:
    """Return the tensors of all runs, each of one shape, as one.

    Raises:
        NotStackable: their shapes differ.
    """
    if len({part.shape for part in parts}) > 1:
        raise NotStackable(
            f"the runs have tensors of different shapes, {', '.join(str(tuple(p.shape)) for p in parts)}"
        )
    return torch.stack(list(parts)).as_subclass(Stacked)


def split_runs(x: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor of each run, which shares memory with ``x``."""
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Tensor).unbind(0)


def get_whole(x: Tensor) -> Tensor:
    """Return the tensor (R, ...) of all runs, which shares memory with ``x``."""
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Tensor)


def divide(tree: Any, count: int) -> list[Any]:
    """Return the part of each of ``count`` runs of a tuple, list or dict of tensors and streams; all else is shared."""
    leaves, spec = tree_flatten(tree)
    parts = [_split_leaf(leaf, count) for leaf in leaves]
    return [tree_unflatten([part[run] for part in parts], spec) for run in range(count)]


def stack_tree(trees: Sequence[Any], name: str = "a value") -> Any:
    """Return the tensors of all runs stacked, in the tree that each run has.

    Raises:
        NotStackable: something else than a tensor differs by run; the message says that ``name`` gives it.
    """
    flat = [tree_flatten(tree) for tree in trees]
    return tree_unflatten(
        [_stack_or_share(name, values) for values in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )


def stack_modules(modules: Sequence[nn.Module], into: nn.Module) -> None:
    """Replace all parameters and buffers of ``into`` by those of R modules of the same structure."""
    for path, module in into.named_modules():
        sources = [source.get_submodule(path) for source in modules]
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    leaf = stack([getattr(source, name).detach() for source in sources])
                    values[name] = leaf.requires_grad_(value.requires_grad)


@torch.no_grad()
def unstack_modules(stacked: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Copy the parameters and buffers of each run into its own module."""
    targets = [{**dict(module.named_parameters()), **dict(module.named_buffers())} for module in modules]
    for name, source in (*stacked.named_parameters(), *stacked.named_buffers()):
        for target, value in zip(targets, split_runs(source), strict=True):
            target[name].copy_(value)


def _split_leaf(leaf: Any, count: int) -> Sequence[Any]:
    if type(leaf) is Stacked:
        return leaf.as_subclass(Tensor).unbind(0)
    return leaf if isinstance(leaf, Generators) else [leaf] * count


def _run_by_run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Apply any operation to one run after the other."""
    if _is_writing(func) and type(args[0]) is not Stacked:
        raise NotStackable(f"{func.__name__} writes the values of one run over those of another")
    count = next(len(leaf) for leaf in tree_leaves((args, kwargs)) if type(leaf) is Stacked)
    calls = divide((args, kwargs), count)
    results = [func(*run_args, **run_kwargs) for run_args, run_kwargs in calls]
    first = next(iter(calls[0][0]), None)
    return args[0] if results[0] is first and first is not None else stack_tree(results, func.__name__)


def _is_writing(func: Callable[..., Any]) -> bool:
    """Whether an operation of torch, by its name, changes its first argument."""
    name = func.__name__
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


_WRITERS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")),
}


def _stack_or_share(name: str, values: Sequence[Any]) -> Any:
    """Return the tensors of all runs as one, or what is the same for all."""
    if isinstance(values[0], Tensor):
        return stack(values)
    if any(value != values[0] for value in values):
        raise NotStackable(f"{name} gives a different {type(values[0]).__name__} for each run")
    return values[0]


def _apply_entrywise(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation on entries to the memory of all runs; NotImplemented if shapes have to be aligned first."""
    return func(*args, **kwargs).as_subclass(Stacked) if _is_aligned(args, kwargs) else NotImplemented


def _change_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Change a tensor by an operation on entries."""
    if type(args[0]) is not Stacked or not _is_aligned(args, kwargs):
        return NotImplemented
    func(*args, **kwargs)
    return args[0]


def _is_aligned(args: Any, kwargs: Any) -> bool:
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return all(type(x) is Stacked and x.dim() == given[0].dim() for x in given)


def _update(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an optimizer's update; tensors of odd size run by run, so that they are rounded as those of one run."""
    parameters = args[0]
    odd = [type(p) is Stacked and (p.numel() // len(p)) % VECTOR > 0 for p in parameters]

    def split_runs(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(parameters):
            return values
        parts: list[Tensor] = []
        for value, parameter, split in zip(values, parameters, odd, strict=True):
            if split:
                parts += value.unbind(0) if value.dim() == parameter.dim() else [value] * len(parameter)
            else:
                parts.append(value)
        return parts

    return func(*map(split_runs, args), **{name: split_runs(value) for name, value in kwargs.items()})


def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = args if len(args) == 3 else (*args, kwargs.get("bias"))
    if type(x) is not Stacked or type(weight) is not Stacked or bias is None or x.dim() != 3:
        return NotImplemented
    return _Linear.apply(*(factor.as_subclass(Tensor) for factor in (x, weight, bias))).as_subclass(Stacked)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """x W^T + b of all runs: (R, B, d), (R, e, d), (R, e) -> (R, B, e)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute the products of all runs at once, and keep what their gradients need."""
        ctx.save_for_backward(x, weight)
        return _multiply(_affine_batch, _affine, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by the same products as those of a single run."""
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            _multiply(torch.bmm, torch.mm, g, weight) if need_x else None,
            _multiply(torch.bmm, torch.mm, g.transpose(1, 2), x) if need_weight else None,
            g.sum(dim=1) if need_bias else None,
        )


def _affine_batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


def _multiply(batched: Callable[..., Tensor], single: Callable[..., Tensor], *factors: Tensor) -> Tensor:
    """Return a product for all runs, in one call if that seems to have the rounding of a single run's.

    Libraries choose an order of summation by shapes and addresses; a batch of small matrices may have another than one
    of them. On a GPU all runs are always computed at once.
    """
    if factors[0].is_cuda:
        return batched(*factors)
    key = (single, *((factor.shape, factor.stride(), factor.dtype) for factor in factors))
    if key not in _SAME_BITS:
        _SAME_BITS[key] = all(_has_same_bits(batched, single, factors, seed) for seed in range(TRIALS))
    return batched(*factors) if _SAME_BITS[key] else _multiply_each(single, *factors)


def _has_same_bits(
    batched: Callable[..., Tensor], single: Callable[..., Tensor], factors: Sequence[Tensor], seed: int
) -> bool:
    rng = torch.Generator().manual_seed(seed)
    drawn = [torch.empty_strided(f.shape, f.stride(), dtype=f.dtype).normal_(generator=rng) for f in factors]
    return torch.equal(batched(*drawn), _multiply_each(single, *drawn))


def _multiply_each(single: Callable[..., Tensor], *factors: Tensor) -> Tensor:
    """Return the product of each run; copies lie at addresses such as those of a single run."""
    each = zip(*([part.clone() for part in factor.unbind(0)] for factor in factors), strict=True)
    return torch.stack([single(*run) for run in each])


_SAME_BITS: dict[Any, bool] = {}
"""Whether products of these shapes have the same bits at once as run by run."""


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    x, targets = args[:2]
    plain = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "label_smoothing": 0.0}
    reduction = kwargs.get("reduction", "mean")
    changed = any(
        kwargs[name] is not value and kwargs[name] != value for name, value in plain.items() if name in kwargs
    )
    if changed or len(args) > 2 or type(x) is not Stacked or type(targets) is not Stacked or x.dim() != 3:
        return NotImplemented
    each = F.cross_entropy(x.flatten(0, 1), targets.flatten(0, 1), reduction="none").view(x.shape[:2])
    if reduction == "none":
        return each.as_subclass(Stacked)
    return each.mean(dim=1).as_subclass(Stacked) if reduction == "mean" else NotImplemented


def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    """Reduce vectors to numbers."""
    simple = len(args) == 1 and not kwargs and args[0].dim() == 2
    return func(args[0], dim=1).as_subclass(Stacked) if simple else NotImplemented


def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if any(type(x) is not Stacked for x in tensors):
        return NotImplemented
    return func(tensors, dim=dim + 1 if dim >= 0 else dim).as_subclass(Stacked)


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    x, size, dim = args if len(args) == 3 else (*args, kwargs.get("dim", 0))
    parts = x.as_subclass(Tensor).split(size, dim=dim + 1 if dim >= 0 else dim)
    return tuple(part.as_subclass(Stacked) for part in parts)


def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x, at = args
    if isinstance(at, slice) or (isinstance(at, Tensor) and type(at) is not Stacked):
        return x.as_subclass(Tensor)[:, at].as_subclass(Stacked)
    if type(x) is not Stacked or type(at) is not Stacked or at.dim() != 2 or at.dtype != torch.long:
        return NotImplemented
    shift = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    rows = x.flatten(0, 1).index_select(0, (at + shift[:, None]).flatten())
    return rows.view(*at.shape, *x.shape[2:]).as_subclass(Stacked)


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Go back from the losses of all runs: the gradients of their sum are those of each."""
    return args[0].as_subclass(Tensor).backward(**{**kwargs, "gradient": torch.ones_like(args[0])})


def _backward_of_several(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, given = args[0], kwargs["grad_tensors"]
    gradients = [torch.ones_like(x) if g is None else g for x, g in zip(tensors, given, strict=True)]
    return func(tensors, **{**kwargs, "grad_tensors": gradients})


def _access(func: Any, args: Any, kwargs: Any) -> Any:
    """Get or set an attribute of the tensor of all runs; one such as ``x.T`` is another tensor, of each run."""
    value = func(*args, **kwargs)
    return NotImplemented if isinstance(value, Tensor) else value


def _read(read: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda func, args, kwargs: read(args[0])


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    shape = args[0].shape[1:]
    return shape[args[1]] if len(args) > 1 else shape


def _get(name: str) -> Any:
    """Return the function that reads an attribute of a tensor."""
    return getattr(Tensor, name).__get__


_ATTRIBUTES = ("__get__", "__set__", "__hash__", "is_floating_point", "is_complex")

_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    torch.cat: _cat,
    torch.split: _split,
    Tensor.split: _split,
    Tensor.mean: _reduce,
    Tensor.__getitem__: _getitem,
    Tensor.backward: _backward,
    torch.autograd.backward: _backward_of_several,
    Tensor.size: _size,
    _get("shape"): _read(lambda x: x.shape[1:]),
    _get("ndim"): _read(lambda x: x.dim() - 1),
    _get("nbytes"): _read(lambda x: x.nbytes // len(x)),
    _get("grad"): _read(lambda x: x.grad.as_subclass(Stacked) if x.grad is not None else None),
    Tensor.dim: _read(lambda x: x.dim() - 1),
    Tensor.numel: _read(lambda x: x.numel() // len(x)),
    Tensor.__len__: _read(lambda x: x.shape[1]),
    **dict.fromkeys(
        (
            torch.relu, F.relu, torch.sigmoid, torch.tanh, torch.exp, torch.clone, torch.zeros_like, torch.ones_like,
            torch.add, torch.sub, torch.mul, torch.div, Tensor.detach, Tensor.clone, Tensor.to, Tensor.add, Tensor.sub,
            Tensor.mul, Tensor.div, Tensor.neg, Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__,
            Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__, Tensor.abs, Tensor.clamp, _get("data"),
        ),
        _apply_entrywise,
    ),
    **dict.fromkeys(
        (Tensor.requires_grad_, Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__, Tensor.copy_, Tensor.zero_),
        _change_in_place,
    ),
    **dict.fromkeys((torch._fused_adam_, torch._fused_sgd_, torch._fused_adagrad_), _update),
}  # fmt: skip


def draw_batches(count: int, size: int, order: torch.Generator, device: torch.device) -> list[Tensor]:
    """Return ``count`` rows in random batches; a last batch of one row joins the one before, for BatchNorm."""
    streams = order if isinstance(order, Generators) else [order]
    drawn = [torch.randperm(count, generator=stream) for stream in streams]
    *others, last = torch.split((stack(drawn) if streams is order else drawn[0]).to(device), size)
    return [*others[:-1], torch.cat([others[-1], last])] if others and len(last) == 1 else [*others, last]
