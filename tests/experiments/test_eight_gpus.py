"""What a GPU receives is counted from a program's text."""

import pytest

from experiments.eight_gpus import received

MB = 2**20
# 1 MB on all devices together, or on each where it is reduced for all; as XLA writes it.
GATHERED = [
    "%a = f8e4m3fn[1024,1024]{1,0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dim",
    "%a = (s8[256,1024]{1,0}, s8[1024,1024]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8]",
    "%a = ((bf16[512,1024]{1,0}), bf16[512,1024]{1,0}) all-to-all-start(%x), "
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}",
]
SUMMED = [
    "%a = ((f32[512,512]{1,0}), f32[128,512]{1,0}) reduce-scatter-start(%x), "
    "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, dim",
    "%a = bf16[128,1024]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[2,4]T(1,0), dim",
]


@pytest.mark.parametrize("line", GATHERED)
def test_three_of_four_parts_are_gathered(line):
    assert received(f"  {line}\n") == {"gathered": 0.75 * MB, "summed": 0}


@pytest.mark.parametrize("line", SUMMED)
def test_three_of_four_parts_are_summed(line):
    assert received(f"  {line}\n") == {"gathered": 0, "summed": 0.75 * MB}


def test_an_array_that_all_devices_need_is_summed_and_gathered():
    line = "%a = (f32[256,512], f32[256,512]) all-reduce-start(%x), replica_groups={{0,1,2,3}}"
    other = "%b = f32[8] add(%x, %y)\n"
    assert received(f"{other}  {line}\n{other}") == {"gathered": 0, "summed": 1.5 * MB}
