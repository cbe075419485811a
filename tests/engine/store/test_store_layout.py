"""A row of bytes gives back exactly the tensors it was made of."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core import tree
from partita.core.types import ClientState
from partita.engine.store.layout import Layout
from support import each

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 50).to(dtype)


tensors = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(personal=tensors, memory=tensors, count=st.integers(0, 4))
def test_unpack_inverts_pack(personal: dict, memory: dict, count: int) -> None:
    def make(part: dict, lead: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {k: filled((*lead, *s), d, i) for i, (k, (s, d)) in enumerate(part.items())}

    layout = Layout.of(ClientState(make(personal, ()), make(memory, ())))
    states = ClientState(make(personal, (count,)), make(memory, (count,)))
    rows = layout.pack(states, count)
    assert rows.shape == (count, layout.width)
    again = layout.unpack(rows)
    for part in ("personal", "memory"):
        expected, found = getattr(states, part), getattr(again, part)
        assert list(found) == list(expected)
        for k, x in expected.items():
            assert found[k].dtype == x.dtype
            assert found[k].shape == x.shape
            assert torch.equal(found[k], x)


def test_unpack_makes_views_and_pack_takes_any_strides() -> None:
    layout = Layout.of(ClientState({"w": torch.zeros(2, 3)}, {"t": torch.tensor(0)}))
    w = torch.arange(24.0, requires_grad=True).view(3, 2, 4).transpose(1, 2)[:, 1:].transpose(1, 2)
    assert not w.is_contiguous()
    rows = layout.pack(ClientState({"w": w}, {"t": torch.tensor(7).expand(4)[:3]}), 3)
    again = layout.unpack(rows)
    assert torch.equal(again.personal["w"], w)
    assert not rows.requires_grad
    memory = {x.untyped_storage().data_ptr() for x in tree.leaves(again)}
    assert memory == {rows.untyped_storage().data_ptr()}


def test_description_survives_json_and_names_what_differs() -> None:
    a = Layout.of(ClientState({"w": torch.zeros(2, 3)}, {}))
    b = Layout.of(ClientState({"w": torch.zeros(2, 4)}, {}))
    a.check(json.loads(json.dumps(a.describe())), "x")
    with pytest.raises(
        ValueError, match=r"there personal 'w' float32 \[2, 3\].*here personal 'w' float32 \[2, 4\]"
    ):
        b.check(a.describe(), "some file")
    with pytest.raises(ValueError, match="some file"):
        b.check("nonsense", "some file")


@each(
    ("states", "message"),
    [
        (ClientState({}, {}), "names differ.*'w'"),
        (ClientState({"w": torch.zeros(2, 3)}, {"c": torch.zeros(2)}), "names differ.*memory 'c'"),
        (ClientState({"w": torch.zeros(3)}, {}), r"float32 \[3\], expected float32 \[2, 3\]"),
        (ClientState({"w": torch.zeros(2, 3, dtype=torch.float64)}, {}), "float64.*expected float32"),
    ],
)
def test_pack_refuses_other_states(states: ClientState, message: str) -> None:
    layout = Layout.of(ClientState({"w": torch.zeros(3)}, {}))
    with pytest.raises(ValueError, match=message):
        layout.pack(states, 2)
