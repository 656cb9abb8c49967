"""What is known of the keys of a store, and whether a call fits them."""

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
    """What the keys of a store look like."""

    known: dict[Key, StoredKeySpec] = field(default_factory=dict)

    def describe_new(self, key: Key, values: Sequence[Tensor]) -> StoredKeySpec:
        """Return what a new key looks like.

        Raises:
            PlanError: it is there already, or of another kind than the others.
        """
        if key in self.known or len(values) > 1:
            found = "is there already" if key in self.known else f"has {len(values)} values"
            raise PlanError(f"init of key {key!r}, which {found}: a key is made once, from one tensor")
        other = next((known for known in self.known if type(known) is not type(key)), None)
        if other is not None:
            raise PlanError(f"init of key {key!r} beside {other!r}: keys of a store are all numbers, or all texts")
        return StoredKeySpec(values[0].shape, values[0].dtype, is_row_sparse(f"init of key {key!r}", values[0]))

    def register(self, key: Key, spec: StoredKeySpec) -> None:
        """The key is there, and looks like this."""
        self.known[key] = spec

    def lookup(self, what: str, key: Key) -> StoredKeySpec:
        """Return what a key looks like.

        Raises:
            PlanError: it is not there.
        """
        look = self.known.get(key)
        if look is None:
            known = ", ".join(repr(name) for name in list(self.known)[:5]) or "none"
            raise PlanError(f"{what} of key {key!r}, which is not there, only {known}: init comes first")
        return look

    def check_push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Values look like their key.

        Raises:
            PlanError: one does not.
        """
        look = self.lookup("push", key)
        for tensor in values:
            if tensor.shape != look.shape or tensor.dtype != look.dtype:
                raise PlanError(
                    f"push of key {key!r} with {tensor.dtype} {tuple(tensor.shape)}, but the key was made from "
                    f"{look.dtype} {tuple(look.shape)}; give tensors like that one"
                )
            if is_row_sparse(f"push of key {key!r}", tensor) != look.has_rows:
                made, remedy = ("sparse", "to_sparse(1)") if look.has_rows else ("dense", "to_dense()")
                raise PlanError(
                    f"push of key {key!r} with a tensor of layout {tensor.layout}, but the key was made from a {made} "
                    f"one; give tensor.{remedy}"
                )

    def resolve_outs(self, what: str, keys: Keys, out: Values | None) -> dict[Key, list[Tensor]]:
        """Return the tensors that each key is written to.

        Raises:
            PlanError: a key is not there, or a tensor does not fit it.
        """
        if out is None:
            raise PlanError(f"{what} of {keys!r} without out: give tensors that the values are written to")
        found = group_by_key(what, keys, out)
        for key, outs in found.items():
            look = self.lookup(what, key)
            for tensor in outs:
                is_row_sparse(f"{what} of key {key!r}", tensor)
                if tensor.shape != look.shape:
                    raise PlanError(
                        f"{what} of key {key!r}, which is {tuple(look.shape)}, into {tuple(tensor.shape)}; give a "
                        "tensor of its shape"
                    )
        return found

    def resolve_row_ids(
        self, keys: Keys, outs: dict[Key, list[Tensor]], row_ids: Values | None
    ) -> dict[Key, list[Tensor]]:
        """Return the numbers of rows for every tensor of every key, ascending and each once.

        Args:
            keys: as they were given.
            outs: what :meth:`outs` returned for them.
            row_ids: for all of these, or for each.

        Raises:
            PlanError: a key has no rows, or not these; or there are not as many as tensors.
        """
        what = "row_sparse_pull"
        if row_ids is None:
            raise PlanError(f"{what} without row_ids: name the rows, or pull all of them with pull")
        one = row_ids[0] if isinstance(row_ids, Sequence) and len(row_ids) == 1 else row_ids
        given = {key: [one] for key in outs} if isinstance(one, Tensor) else group_by_key(what, keys, row_ids)
        found = {}
        for key, ids in given.items():
            look = self.lookup(what, key)
            if not look.has_rows:
                raise PlanError(
                    f"{what} of key {key!r}, which was made from a dense tensor; pull it, or init it with "
                    "tensor.to_sparse(1)"
                )
            if len(ids) not in {1, len(outs[key])}:
                raise PlanError(
                    f"{what} of key {key!r} with {len(outs[key])} tensors and {len(ids)} row_ids: give one for all of "
                    "them, or one for each"
                )
            numbers = [normalize_row_ids(f"{what} of key {key!r}", each, look.shape[0]) for each in ids]
            found[key] = numbers * (len(outs[key]) // len(ids))
        return found
