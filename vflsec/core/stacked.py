"""Tensors of several runs as one, so that the code of one run trains all of them at once."""

# ruff: noqa: ARG001  (all rules have one signature)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from vflsec.core.errors import NotStackable

VECTOR = 16
"""Optimizers round the entries of a tensor beyond a multiple of so many in another way."""


class Stacked(Tensor):
    """R tensors of one shape, one for each run.

    It has the shape of one of them. Every operation acts on each run by itself, and its result is a ``Stacked`` tensor
    again; plain tensors among its arguments are the same for all runs. No run's gradient depends on another run.

    Common operations act on the memory of all runs at once, with the rounding of an operation on a single run; others
    go through ``torch.vmap``. An operation that gives a number, such as ``float(x)``, raises ``NotStackable``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply an operation of torch to each run."""
        rule, kwargs = _RULES.get(func), kwargs or {}
        with torch._C.DisableTorchFunction():
            if rule is None:
                rule = _attribute if func.__name__ in _ATTRIBUTES else _mapped
            found = rule(func, args, kwargs)
            return _mapped(func, args, kwargs) if found is NotImplemented else found

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, without the data."""
        return f"Stacked({len(runs(self))} runs of {tuple(self.shape)})"


def stack(parts: Sequence[Tensor]) -> Stacked:
    """Return the tensors of all runs, each of one shape, as one."""
    found: Stacked = _stacked(torch.stack(list(parts)))
    return found


def runs(x: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor of each run, which shares memory with ``x``."""
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Tensor).unbind(0)


def whole(x: Tensor) -> Tensor:
    """Return the tensor (R, ...) of all runs, which shares memory with ``x``."""
    with torch._C.DisableTorchFunction():
        return x.as_subclass(Tensor)


def stack_modules(modules: Sequence[nn.Module], into: nn.Module) -> None:
    """Replace all parameters and buffers of ``into`` by those of R modules of the same structure."""
    for path, own in into.named_modules():
        others = [module.get_submodule(path) for module in modules]
        for name, value in own._parameters.items():
            if value is not None:
                leaf = stack([getattr(other, name).detach() for other in others])
                own._parameters[name] = leaf.requires_grad_(value.requires_grad)
        for name, value in own._buffers.items():
            if value is not None:
                own._buffers[name] = stack([getattr(other, name) for other in others])


@torch.no_grad()
def unstack_modules(stacked: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Copy the parameters and buffers of each run into its own module."""
    of_each = [{**dict(module.named_parameters()), **dict(module.named_buffers())} for module in modules]
    for name, source in (*stacked.named_parameters(), *stacked.named_buffers()):
        for own, value in zip(of_each, runs(source), strict=True):
            own[name].copy_(value)


def _stacked(x: Any) -> Any:
    return x.as_subclass(Stacked) if isinstance(x, Tensor) else x


def _mapped(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Apply any operation by ``torch.vmap``."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if type(leaf) is Stacked]

    def one(*own: Tensor) -> Any:
        filled = list(leaves)
        for place, value in zip(places, own, strict=True):
            filled[place] = value
        found_args, found_kwargs = tree_unflatten(filled, spec)
        return func(*found_args, **found_kwargs)

    try:
        found = torch.vmap(one)(*(leaves[place].as_subclass(Tensor) for place in places))
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotStackable(f"{getattr(func, '__name__', func)}: {reason}") from error
    return tree_map(_stacked, found)


def _entrywise(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation on entries to the memory of all runs; NotImplemented if shapes have to be aligned first."""
    dims = {x.dim() if type(x) is Stacked else -1 for x in args if isinstance(x, Tensor)}
    return func(*args, **kwargs).as_subclass(Stacked) if len(dims) == 1 else NotImplemented


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Change a tensor by an operation on entries; ``x += y`` rebinds a plain ``x`` to a tensor of all runs."""
    dims = {x.dim() if type(x) is Stacked else -1 for x in args if isinstance(x, Tensor)}
    if type(args[0]) is not Stacked and func in (Tensor.__iadd__, Tensor.add_):
        return _mapped(torch.add, args, kwargs)
    if len(dims) > 1:
        return NotImplemented
    func(*args, **kwargs)
    return args[0]


def _update(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an optimizer's update; tensors of odd size run by run, so that they are rounded as those of one run."""
    parameters = args[0]
    odd = [type(p) is Stacked and (p.numel() // len(p)) % VECTOR > 0 for p in parameters]

    def apart(values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(parameters):
            return values
        parts: list[Tensor] = []
        for value, parameter, split in zip(values, parameters, odd, strict=True):
            if split:
                parts += value.unbind(0) if value.dim() == parameter.dim() else [value] * len(parameter)
            else:
                parts.append(value)
        return parts

    return func(*map(apart, args), **{name: apart(value) for name, value in kwargs.items()})


def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = args if len(args) == 3 else (*args, kwargs.get("bias"))
    if type(x) is not Stacked or type(weight) is not Stacked or x.dim() != 3:
        return NotImplemented
    turned = weight.transpose(1, 2)
    found = torch.bmm(x, turned) if bias is None else torch.baddbmm(bias[:, None], x, turned)
    return found.as_subclass(Stacked)


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    x, targets = args[:2]
    others = {name: value for name, value in kwargs.items() if value not in (None, 0.0, -100)}
    reduction = others.pop("reduction", "mean")
    if others or len(args) > 2 or type(x) is not Stacked or type(targets) is not Stacked or x.dim() != 3:
        return NotImplemented
    each = F.cross_entropy(x.flatten(0, 1), targets.flatten(0, 1), reduction="none").view(x.shape[:2])
    if reduction == "none":
        return each.as_subclass(Stacked)
    return each.mean(dim=1).as_subclass(Stacked) if reduction == "mean" else NotImplemented


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
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


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    """Get or set an attribute of the tensor of all runs; one such as ``x.T`` is another tensor, of each run."""
    found = func(*args, **kwargs)
    return NotImplemented if isinstance(found, Tensor) else found


def _fact(found: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda func, args, kwargs: found(args[0])


def _number(func: Any, args: Any, kwargs: Any) -> Any:
    raise NotStackable(f"{func.__name__} reads a number of each run")


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    shape = args[0].shape[1:]
    return shape[args[1]] if len(args) > 1 else shape


def _of(name: str) -> Any:
    """Return the function that reads an attribute of a tensor."""
    return getattr(Tensor, name).__get__


_ATTRIBUTES = ("__get__", "__set__", "__hash__", "is_floating_point", "is_complex")

_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    torch.cat: _cat,
    torch.split: _split,
    Tensor.split: _split,
    Tensor.mean: _reduced,
    Tensor.__getitem__: _getitem,
    Tensor.backward: _backward,
    torch.autograd.backward: _backward_of_several,
    Tensor.size: _size,
    _of("shape"): _fact(lambda x: x.shape[1:]),
    _of("ndim"): _fact(lambda x: x.dim() - 1),
    _of("nbytes"): _fact(lambda x: x.nbytes // len(x)),
    _of("grad"): _fact(lambda x: x.grad.as_subclass(Stacked) if x.grad is not None else None),
    Tensor.dim: _fact(lambda x: x.dim() - 1),
    Tensor.numel: _fact(lambda x: x.numel() // len(x)),
    Tensor.__len__: _fact(lambda x: x.shape[1]),
    **dict.fromkeys(
        (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.numpy),
        _number,
    ),
    **dict.fromkeys(
        (
            torch.relu, F.relu, torch.sigmoid, torch.tanh, torch.exp, torch.clone, torch.zeros_like, torch.ones_like,
            torch.add, torch.sub, torch.mul, torch.div, Tensor.detach, Tensor.clone, Tensor.to, Tensor.add, Tensor.sub,
            Tensor.mul, Tensor.div, Tensor.neg, Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__,
            Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__, _of("data"),
        ),
        _entrywise,
    ),
    **dict.fromkeys(
        (Tensor.requires_grad_, Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__, Tensor.copy_, Tensor.zero_),
        _in_place,
    ),
    **dict.fromkeys((torch._fused_adam_, torch._fused_sgd_, torch._fused_adagrad_), _update),
}  # fmt: skip
