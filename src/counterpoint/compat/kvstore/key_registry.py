"""The keys of a store, and checks of calls against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from counterpoint.compat.kvstore.arguments import Key, Keys, Values, group_by_key
from counterpoint.compat.kvstore.sparse_rows import is_row_sparse, normalize_row_ids
from counterpoint.compat.kvstore.store import StoredKeySpec
from counterpoint.errors import PlanError


@dataclass(slots=True)
class KeyRegistry:
    """Specification of each key of a store."""

    specs: dict[Key, StoredKeySpec] = field(default_factory=dict)

    def describe_new(self, key: Key, values: Sequence[Tensor]) -> StoredKeySpec:
        """Return the specification of a new key.

        Raises:
            PlanError: it exists already, or is an int where other keys are str, or the reverse.
        """
        if key in self.specs or len(values) > 1:
            problem = "exists already" if key in self.specs else f"has {len(values)} values"
            raise PlanError(f"init of key {key!r}, which {problem}: a key is created once, from one tensor")
        other = next((known for known in self.specs if type(known) is not type(key)), None)
        if other is not None:
            raise PlanError(f"init of key {key!r} in addition to {other!r}: keys of a store are all int, or all str")
        return StoredKeySpec(values[0].shape, values[0].dtype, is_row_sparse(f"init of key {key!r}", values[0]))

    def register(self, key: Key, spec: StoredKeySpec) -> None:
        """Add a key."""
        self.specs[key] = spec

    def lookup(self, call: str, key: Key) -> StoredKeySpec:
        """Return the specification of a key.

        Raises:
            PlanError: it does not exist.
        """
        spec = self.specs.get(key)
        if spec is None:
            known = ", ".join(repr(name) for name in list(self.specs)[:5]) or "none"
            raise PlanError(f"{call} of key {key!r}, which does not exist (keys: {known}); call init first")
        return spec

    def check_push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Check that values match their key.

        Raises:
            PlanError: one does not.
        """
        spec = self.lookup("push", key)
        for tensor in values:
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                raise PlanError(
                    f"push of key {key!r} with {tensor.dtype} {tuple(tensor.shape)}, but the key was created from "
                    f"{spec.dtype} {tuple(spec.shape)}; give tensors of that dtype and shape"
                )
            if is_row_sparse(f"push of key {key!r}", tensor) != spec.has_rows:
                layout, conversion = ("sparse", "to_sparse(1)") if spec.has_rows else ("dense", "to_dense()")
                raise PlanError(
                    f"push of key {key!r} with a tensor of layout {tensor.layout}, but the key was created from a "
                    f"{layout} "
                    f"one; give tensor.{conversion}"
                )

    def resolve_outs(self, call: str, keys: Keys, out: Values | None) -> dict[Key, list[Tensor]]:
        """Return the output tensors of each key.

        Raises:
            PlanError: a key does not exist, or a tensor does not match it.
        """
        if out is None:
            raise PlanError(f"{call} of {keys!r} without out; give the output tensors")
        outs_by_key = group_by_key(call, keys, out)
        for key, outs in outs_by_key.items():
            spec = self.lookup(call, key)
            for tensor in outs:
                is_row_sparse(f"{call} of key {key!r}", tensor)
                if tensor.shape != spec.shape:
                    raise PlanError(
                        f"{call} of key {key!r}, which is {tuple(spec.shape)}, into {tuple(tensor.shape)}; give a "
                        "tensor of its shape"
                    )
        return outs_by_key

    def resolve_row_ids(
        self, keys: Keys, outs: dict[Key, list[Tensor]], row_ids: Values | None
    ) -> dict[Key, list[Tensor]]:
        """Return the row indices for every tensor of every key, sorted and unique.

        Args:
            keys: as passed by the user.
            outs: of these keys, from :meth:`resolve_outs`.
            row_ids: one for all of these, or one for each.

        Raises:
            PlanError: a key is not row-sparse, an index is out of range, or their number does not match the tensors.
        """
        call = "row_sparse_pull"
        if row_ids is None:
            raise PlanError(f"{call} without row_ids: give the row indices, or use pull for all rows")
        only = row_ids[0] if isinstance(row_ids, Sequence) and len(row_ids) == 1 else row_ids
        ids_by_key = {key: [only] for key in outs} if isinstance(only, Tensor) else group_by_key(call, keys, row_ids)
        row_indices = {}
        for key, ids in ids_by_key.items():
            spec = self.lookup(call, key)
            if not spec.has_rows:
                raise PlanError(
                    f"{call} of key {key!r}, which was created from a dense tensor; use pull, or init it with "
                    "tensor.to_sparse(1)"
                )
            if len(ids) not in {1, len(outs[key])}:
                raise PlanError(
                    f"{call} of key {key!r} with {len(outs[key])} tensors and {len(ids)} row_ids: give one for all "
                    "tensors, "
                    "or one for each"
                )
            sorted_ids = [
                normalize_row_ids(f"{call} of key {key!r}", ids_of_tensor, spec.shape[0]) for ids_of_tensor in ids
            ]
            row_indices[key] = sorted_ids * (len(outs[key]) // len(ids))
        return row_indices
