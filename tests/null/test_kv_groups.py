"""Cache groups: which layers share a block table, over one pool of equal blocks."""

from __future__ import annotations

import pytest
from simulation import full_layer, sliding_layer

from core.errors import UnsupportedError
from core.kv import KVCacheGroups
from core.spec import CacheKind, DType, KVCacheSpec


def shapes(groups: KVCacheGroups) -> list[tuple[int, int]]:
    return [(group.window, len(group.layers)) for group in groups.groups]


def test_a_uniform_model_is_one_group() -> None:
    groups = KVCacheGroups.from_layers([full_layer()] * 30)
    assert shapes(groups) == [(0, 30)] and groups.num_slabs == 30
    assert groups.layer_slabs == tuple((0, slab) for slab in range(30))


def test_three_full_and_fifteen_sliding_layers_are_six_groups_of_three() -> None:
    layers = [full_layer() if index % 6 == 5 else sliding_layer(512) for index in range(18)]
    groups = KVCacheGroups.from_layers(layers)
    assert groups.num_slabs == 3
    assert sorted(shapes(groups)) == [(0, 3)] + [(512, 3)] * 5
    assert groups.layer_slabs[5] is not None and groups.groups[groups.layer_slabs[5][0]].layers == (5, 11, 17)


def test_the_last_group_may_have_unused_slabs() -> None:
    groups = KVCacheGroups.from_layers([full_layer()] * 4 + [sliding_layer(1024)] * 22)
    assert groups.num_slabs == 4
    assert shapes(groups) == [(0, 4)] + [(1024, 4)] * 5 + [(1024, 2)]


def test_nearly_equal_counts_are_padded_and_not_split() -> None:
    groups = KVCacheGroups.from_layers([full_layer()] * 13 + [sliding_layer(64)] * 14)
    assert shapes(groups) == [(0, 13), (64, 14)] and groups.num_slabs == 14


@pytest.mark.parametrize("num_sliding", range(1, 20))
@pytest.mark.parametrize("num_full", range(1, 6))
def test_every_layer_has_its_own_slab_in_a_group_of_its_kind(num_full: int, num_sliding: int) -> None:
    layers = [full_layer()] * num_full + [None] + [sliding_layer(8)] * num_sliding
    groups = KVCacheGroups.from_layers(layers)
    places = [place for place in groups.layer_slabs if place is not None]
    assert len(set(places)) == len(places) == num_full + num_sliding
    assert groups.layer_slabs[num_full] is None
    for layer, place in enumerate(groups.layer_slabs):
        if place is not None:
            assert groups.groups[place[0]].spec == layers[layer] and place[1] < groups.num_slabs
            assert groups.groups[place[0]].layers[place[1]] == layer


def test_block_bytes_follow_the_widest_layer() -> None:
    wide = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32)
    groups = KVCacheGroups.from_layers([wide, sliding_layer(4)])
    assert groups.num_slabs == 1 and groups.block_bytes(16) == 2 * 16 * 4 * 16


def test_recurrent_state_is_refused_by_name() -> None:
    state = KVCacheSpec(kind=CacheKind.STATE, num_kv_heads=1, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32)
    with pytest.raises(UnsupportedError, match="'state'"):
        KVCacheGroups.from_layers([state])
