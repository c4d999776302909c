"""CUDA kernels without a GPU: they compile for each architecture, spill nothing, and share structures with the host."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from click.testing import CliRunner

from hisparse.cli import main
from hisparse.cli.kernels import ARCHITECTURES
from kernels import compile as kernels_compile
from kernels.cuda import header, jit, parameters, prompt_index, quantize, structures
from kernels.cuda.attention import HEADS_TOGETHER, HOPPER_KINDS, hopper_defines
from kernels.cuda.block_plans import SHARED_BYTES_MAX, LinearPlan, forms
from kernels.cuda.index_topk import Indexer
from kernels.cuda.launch import KERNELS, RANKS, check_pool
from kernels.cuda.swap_in import block_entries_of, blocks_per_request, has_room, refill_clusters, replay_misses, swap_in
from kernels.layout import Geometry
from kernels.prompt_pieces import GROUP
from kernels.state import DeviceState, MissPlan
from protocol.errors import BadInput, ConfigError, InternalError
from tests.support.kept_kernels import kept_unit
from tests.support.tier import PARTS

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the nvrtc wheel: pip install 'hisparse[cuda]'")

DEFINES = jit.row_defines(Geometry(1, 656, (0,), 132, 2048))
REGISTERS = {"index_scores": 255, "index_select": 128, "attend_rows": 168, "block_linear": 168, "prompt_index": 96}
TINY = 'extern "C" __global__ void tiny(int* a) { a[threadIdx.x] = SCALE; }\n'


def layout_of(defines: jit.Defines) -> tuple[int, int, int]:
    """Return the row layout, one of LAYOUTS, that a unit is compiled for."""
    given = dict(defines)
    split = given["PLANE0_BYTES"] if given["PLANES"] == 2 else 0
    return given["ROW_BYTES"], given["INDEX_ROW_BYTES"], split


def hopper_part(layout: tuple[int, int, int], ranks: int) -> int:
    """Return the part that compiles swap_in of `layout` for Hopper in clusters of `ranks`: two sizes of each layout."""
    return (kernels_compile.LAYOUTS.index(layout) + RANKS.index(ranks)) % PARTS


def kind_part(defines: jit.Defines) -> int:
    """Return the part that compiles attend_rows and prompt_index over fp8, bfloat16 or fp4."""
    given = dict(defines)
    return 2 if given["FP4"] else given["KEY_BYTES"] - 1


def is_in_part(part: int, unit: str, defines: jit.Defines) -> bool:
    """Return whether `part` compiles this for Hopper; each part compiles the units that cost little."""
    if unit == "swap_in":
        return hopper_part(layout_of(defines), dict(defines)["RANKS"]) == part
    return unit not in ("attend_rows", "prompt_index") or kind_part(defines) == part


def is_one_of_few(unit: str, defines: jit.Defines) -> bool:
    """Return whether this is compiled behind Hopper: of swap_in each layout in clusters of another size, and the first
    one also in the largest."""
    if unit != "swap_in":
        return True
    place, ranks = kernels_compile.LAYOUTS.index(layout_of(defines)), dict(defines)["RANKS"]
    return ranks == RANKS[place % len(RANKS)] or (place == 0 and ranks == RANKS[-1])


def has_no_cluster(unit: str, defines: jit.Defines) -> bool:
    return unit != "swap_in" or dict(defines)["RANKS"] == 1


#: Architectures before Hopper, which have no clusters, and behind it, each compiled in a part of its own.
OTHERS: Final = {"sm_80": has_no_cluster, "sm_100": is_one_of_few, "sm_120": is_one_of_few}


@pytest.fixture
def compile_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Compile the wanted variants of an architecture, and check what the compiler says of each kernel."""

    def compile_them(arch: str, wanted: Callable[[str, jit.Defines], bool]) -> None:
        chosen = [it for it in kernels_compile.variants(arch) if wanted(*it)]
        monkeypatch.setattr(kernels_compile, "variants", lambda of: chosen)
        monkeypatch.setattr(kernels_compile, "compile_unit", kept_unit)
        assert kernels_compile.main(["--arch", arch, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        hopper = {"attend_rows", "block_linear", "prompt_index", "prompt_merge", "encode_fp4", *quantize.KERNELS}
        alone = {"null_kernel", "index_scores", "index_select"} | (hopper if arch == "sm_90" else set())
        assert {line["kernel"] for line in lines} == {name for _, name in KERNELS} | {"swap_in"} | alone
        for line in lines:
            assert line["arch"] == arch
            assert line["spill_bytes"] <= kernels_compile.SPILL_BYTES.get(line["kernel"], 0), line
            assert 0 < line["registers"] <= REGISTERS.get(line["kernel"], 80), line

    return compile_them


@pytest.mark.compile
@pytest.mark.timeout(900)  # 100 s of processor time, on cores that others use too
@pytest.mark.parametrize("part", [pytest.param(it, marks=pytest.mark.deep(part=it)) for it in range(PARTS)])
def test_variant_compiles_without_spills(part: int, compile_all: Callable[..., None]) -> None:
    """Hopper's: of swap_in a third of the pairs of layout and cluster, of others one kind of rows or keys. Each run has
    one of the parts."""
    compile_all("sm_90", partial(is_in_part, part))


@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", [pytest.param(it, marks=pytest.mark.deep(part=at)) for at, it in enumerate(OTHERS)])
def test_every_variant_compiles_without_spills(arch: str, compile_all: Callable[..., None]) -> None:
    """Each layout and each cluster, for architectures other than Hopper."""
    compile_all(arch, OTHERS[arch])


def test_parts_together_compile_every_variant_and_each_has_every_layout_and_cluster() -> None:
    hopper = list(kernels_compile.variants("sm_90"))
    parts = [[it for it in hopper if is_in_part(part, *it)] for part in range(PARTS)]
    assert {it for part in parts for it in part} == set(hopper)
    few = [it for it in kernels_compile.variants("sm_100") if is_one_of_few(*it)]
    for variants in (*parts, few):
        swaps = [defines for unit, defines in variants if unit == "swap_in"]
        assert {layout_of(defines) for defines in swaps} == set(kernels_compile.LAYOUTS)
        assert {dict(defines)["RANKS"] for defines in swaps} == set(RANKS)
        assert {dict(defines)["DRAFT"] for defines in swaps} == {0, 1}
    assert [sum(unit == "attend_rows" for unit, _ in part) for part in parts] == [4] * PARTS
    assert len(hopper) < sum(map(len, parts)) < 2 * len(hopper)
    assert {"sm_90", *OTHERS} == set(kernels_compile.ARCHITECTURES)
    assert len(OTHERS) == PARTS


def host_loads_wait(layout: tuple[int, int, int], ranks: int) -> list[str]:
    """Return the places in Hopper's code of swap_in at which a host load waits for another one."""
    row_bytes, index_row_bytes, split = layout
    defines = jit.row_defines(Geometry(2, row_bytes, (0, 1), index_row_bytes, 2048, split))
    text = section(kept_unit("swap_in", (*defines, ("RANKS", ranks), ("DRAFT", 0)), "sm_90").cubin, ".text.swap_in")
    code = [Instruction(*words) for words in struct.iter_unpack("<QQ", text)]
    loads = [place for place, it in enumerate(code) if it.loads_once]
    first = loads[: 5 if split else 8]  # those that are in flight together
    counted = {code[place].scoreboard for place in first}
    assert len(counted) == 1, "all on one scoreboard"
    assert not any(it.moves_stack for it in code)
    waits = [place for place in range(first[0] + 1, first[-1] + 1) if code[place].awaits >> next(iter(counted)) & 1]
    return [hex(16 * place) for place in waits]


HOST_LOADS: Final = list(product(kernels_compile.LAYOUTS, RANKS))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [pytest.param(*it, marks=pytest.mark.deep(part=hopper_part(*it))) for it in HOST_LOADS],
    ids=str,
)
def test_swap_in_host_loads_do_not_wait_for_each_other(layout: tuple[int, int, int], ranks: int) -> None:
    """A load whose register had an older one pending would wait for all that its scoreboard counts: for a round trip
    over PCIe, several thousand cycles. Nor has the kernel a stack (benchmarks/NOTES.md: swap_in)."""
    assert host_loads_wait(layout, ranks) == []


class Instruction:
    """16 bytes of machine code of sm_90, as far as needed here. Found by disassembling (nvdisasm -hex)."""

    def __init__(self, low: int, high: int) -> None:
        self.opcode, self.target, self.source = low & 0xFFF, low >> 16 & 0xFF, low >> 24 & 0xFF
        self.loads_once = self.opcode == 0x981 and bool(high >> 22 & 1)  # LDG.E.NA
        self.scoreboard = high >> 46 & 7  # that counts it until its result is there; 7: none
        self.awaits = high >> 52 & 63  # a bit for each scoreboard
        self.multiplies_registers = self.opcode in (0xDF0, 0xDF3)  # HGMMA, QGMMA
        self.multiplies = self.multiplies_registers or self.opcode == 0x9F0  # HGMMA of two operands in shared memory
        self.closes_group = self.multiplies and not high >> 20 & 7  # gsb0
        self.awaits_products = self.opcode == 0x9C5 and bool(low >> 47 & 1)  # WARPGROUP.DEPBAR
        self.products_left = high >> 8 & 7  # groups of them that are not awaited
        self.loads_shared = self.opcode == 0x984  # LDS
        self.permutes = self.opcode in (0x216, 0x416, 0x816, 0x212, 0x812)  # PRMT, LOP3
        self.packs = self.opcode == 0x23E  # F2FP
        self.moves_stack = self.opcode == 0x836 and self.target == self.source == 1  # VIADD R1, R1


def section(elf: bytes, name: str) -> bytes:
    """A section of a 64-bit ELF file."""
    begin, size = place_of(elf, name)
    return elf[begin : begin + size]


def place_of(elf: bytes, name: str) -> tuple[int, int]:
    """Offset in the file and bytes of a section; one without contents has bytes all the same."""
    headers, each, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    table = [struct.unpack_from("<IIQQQQ", elf, headers + each * place) for place in range(count)]
    strings = elf[table[names][4] :]
    for at, _, _, _, begin, size in table:
        if strings[at : strings.index(b"\0", at)].decode() == name:
            return begin, size
    raise AssertionError(name)


#: Of shared memory on Hopper, in each block and beside the 227 KiB that a block gets.
SYSTEM_SHARED_BYTES: Final = 1024


def in_parts_of_kinds(variants: Iterable[jit.Defines]) -> list[Any]:
    """Return `variants` as parameters of tests, each in the part that compiles it."""
    return [pytest.param(defines, marks=pytest.mark.deep(part=kind_part(defines))) for defines in variants]


attention_variants = pytest.mark.parametrize(
    "defines",
    in_parts_of_kinds(kernels_compile.attention_variants()),
    ids=lambda defines: "-".join(str(it[1]) for it in defines[:4]),
)


def code_of_attention(defines: jit.Defines) -> list[Instruction]:
    text = section(kept_unit("attend_rows", defines, "sm_90").cubin, ".text.attend_rows")
    return [Instruction(*words) for words in struct.iter_unpack("<QQ", text)]


@attention_variants
def test_products_of_attention_are_asynchronous(defines: jit.Defines) -> None:
    """The last product of a group alone is counted, as with block_linear: scores ahead of the first turn and in each
    turn of a round, sums twice in each, with scores and without. Where scores are a turn ahead, one turn is written."""
    products = [it for it in code_of_attention(defines) if it.multiplies]
    wide, fp8 = dict(defines)["HEADS"] == 128, dict(defines)["KEY_BYTES"] == 1
    turns, sums = (1 if fp8 else 3, 4) if wide else (2, 8)
    groups = 2 * (1 + turns) * [18] + 2 * 2 * turns * [sums]
    assert len(products) == sum(groups)
    assert sum(it.closes_group for it in products) == len(groups)


@pytest.mark.parametrize("heads", HEADS_TOGETHER)
@pytest.mark.parametrize(
    "kind", [pytest.param(it, marks=pytest.mark.deep(part=kind_part(hopper_defines(it, 64)))) for it in HOPPER_KINDS]
)
def test_sinks_cost_nothing_between_products(kind: str, heads: int) -> None:
    """The same count of instructions ahead of each product as without sinks, but for what the first group does behind
    its last one; and as many registers."""
    ahead = []
    for sinks in (False, True):
        code = code_of_attention(hopper_defines(kind, heads, sinks))
        products = [place for place, it in enumerate(code) if it.multiplies]
        own = len(products) // 2
        ahead.append([later - earlier for earlier, later in pairwise([0, *products])])
        ahead[-1][own] = 0
    assert ahead[0] == ahead[1]
    resources = [kept_unit("attend_rows", hopper_defines(kind, heads, it), "sm_90").resources for it in (False, True)]
    assert resources[0] == resources[1]


@attention_variants
def test_attention_keeps_shares_in_registers_that_products_still_read(defines: jit.Defines) -> None:
    """A product reads its shares from registers until it is awaited; nothing in the machine protects them."""
    read: set[int] = set()
    conversions = 0
    for it in code_of_attention(defines):
        if it.multiplies_registers:
            read.update(range(it.source, it.source + 4))
        elif it.awaits_products and it.products_left == 0:
            read.clear()
        elif it.packs:
            conversions += 1
            assert it.target not in read
    assert conversions, "conversions are told from other instructions"


@pytest.mark.parametrize(("plan", "form"), forms(), ids=str)
def test_products_of_block_linear_are_asynchronous(plan: LinearPlan, form: int) -> None:
    """Where ptxas takes the sums to be in use, it waits after every product. Of an asynchronous group of products the
    last one alone is counted (gsb0)."""
    cubin = kept_unit("block_linear", plan.defines(form), "sm_90").cubin
    text = section(cubin, ".text.block_linear")
    code = [Instruction(*words) for words in struct.iter_unpack("<QQ", text)]
    products = [it for it in code if it.multiplies]
    assert len(products) == 2 * plan.chunk
    assert sum(it.closes_group for it in products) == 2


@pytest.mark.parametrize(("plan", "form"), forms(), ids=str)
def test_block_linear_fits_beside_its_own_variables(plan: LinearPlan, form: int) -> None:
    """A launch asks for SHARED_BYTES_MAX at most; what the kernel declares comes on top, behind a KiB of the system."""
    cubin = kept_unit("block_linear", plan.defines(form), "sm_90").cubin
    own = place_of(cubin, ".nv.shared.block_linear")[1] - SYSTEM_SHARED_BYTES
    assert 0 < own <= (227 << 10) - SHARED_BYTES_MAX


def code_of_prompt_index(defines: jit.Defines) -> list[Instruction]:
    text = section(kept_unit("prompt_index", defines, "sm_90").cubin, ".text.prompt_index")
    return [Instruction(*words) for words in struct.iter_unpack("<QQ", text)]


prompt_variants = pytest.mark.parametrize(
    "defines",
    in_parts_of_kinds(prompt_index.variants()),
    ids=lambda defines: "-".join(str(it[1]) for it in defines[:2]),
)


@prompt_variants
def test_products_of_prompt_index_are_asynchronous(defines: jit.Defines) -> None:
    """The last product of a group alone is counted, as with block_linear."""
    given = dict(defines)
    chunks = GROUP * given["HEADS"] // (128 if given["KEY_BYTES"] == 1 else 64)
    closes = [it.closes_group for it in code_of_prompt_index(defines) if it.multiplies]
    steps = 4 * given["KEY_BYTES"]
    assert closes == (1 + chunks) * ([False] * (steps - 1) + [True]), "of the first page's first chunk, and of a page"


@prompt_variants
def test_prompt_index_loads_no_key_into_registers_that_products_still_read(defines: jit.Defines) -> None:
    """A product reads its keys from registers until it is awaited; nothing in the machine protects them."""
    read: set[int] = set()
    loads = 0
    for it in code_of_prompt_index(defines):
        if it.multiplies:
            read.update(range(it.source, it.source + 4))
        elif it.awaits_products:
            read.clear()
        elif it.loads_shared or it.permutes:
            loads += bool(read) and it.loads_shared
            assert it.target not in read
    assert loads, "loads are told from other instructions"


INDEXERS_ON_HOPPER: Final = [it for it in kernels_compile.INDEXERS if it.on_hopper(90)]


@pytest.mark.parametrize("indexer", INDEXERS_ON_HOPPER, ids=lambda it: f"{it.heads}{'-fp4' * it.codes}")
def test_keys_of_index_scores_are_decoded_before_products_read_them(indexer: Indexer) -> None:
    """Products of a page are one group. No instruction between the first of them and their end writes to their keys."""
    text = section(kept_unit("index_hopper", indexer.defines(90), "sm_90").cubin, ".text.index_scores")
    code = [Instruction(*words) for words in struct.iter_unpack("<QQ", text)]
    products = [place for place, it in enumerate(code) if it.multiplies]
    assert [code[place].closes_group for place in products] == [False, False, False, True]
    read = {code[place].source + word for place in products for word in range(4)}
    end = next(place for place in range(products[-1], len(code)) if code[place].awaits_products)
    for it in code[products[0] : end]:
        assert not (it.loads_shared or it.permutes) or it.target not in read
    decoded = {it.target for it in code[: products[0]] if it.permutes}
    assert read <= decoded or not indexer.codes, "decoding is told from other instructions"


def test_header_is_generated() -> None:
    assert header.HEADER.read_text() == header.render(), f"run {header.COMMAND}"


def test_header_asserts_the_sizes_that_ctypes_has() -> None:
    size = f"sizeof(SwapIn) == {ctypes.sizeof(structures.SwapIn)}"
    with pytest.raises(InternalError, match="as ctypes lays it out"):
        jit.compile_source(header.render().replace(size, f"{size} + 4"), "layout", (), "sm_90")


@pytest.mark.parametrize(
    ("row_bytes", "split", "host_address", "aligns"),
    [
        (13, 0, 0, [1]),
        (656, 0, 0, [16]),
        (1152, 0, 0, [128]),
        (196, 0, 0, [4]),
        (320, 0, 0, [64]),
        (1152, 0, 8, [8]),
        (584, 512, 0, [128, 8]),
        (584, 72, 0, [8, 128]),
        (64, 13, 0, [1, 1]),
        (512, 256, 0, [128, 128]),
    ],
)
def test_each_plane_moves_in_the_widest_words(row_bytes: int, split: int, host_address: int, aligns: list[int]) -> None:
    geometry = Geometry(2, row_bytes, (0, 1), 256, 1, split)
    defines = dict(jit.row_defines(geometry, host_address))
    assert [defines[f"PLANE{number}_BYTES"] for number in range(defines["PLANES"])] == list(geometry.planes)
    assert [defines[f"PLANE{number}_ALIGN"] for number in range(defines["PLANES"])] == aligns


def test_compile_errors_carry_the_log() -> None:
    with pytest.raises(InternalError, match="identifier"):
        jit.compile_source('extern "C" __global__ void f() { undefined_thing(); }', "broken", (), "sm_90")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the units that were really compiled."""
    calls: list[str] = []

    def compile_tiny(unit: str, defines: jit.Defines, arch: str) -> jit.Compiled:
        calls.append(unit)
        return jit.compile_source(TINY, unit, defines, arch)

    monkeypatch.setattr(jit, "compile_unit", compile_tiny)
    return calls


def test_cache_keeps_good_entries_and_repairs_broken_ones(tmp_path: Path, compiled: list[str]) -> None:
    defines = (("SCALE", 3),)
    first = jit.cached_unit("swap_in", defines, "sm_90", tmp_path / "new")
    assert jit.cached_unit("swap_in", defines, "sm_90", tmp_path / "new") == first
    assert compiled == ["swap_in"]
    (place,) = (tmp_path / "new").iterdir()
    place.write_bytes(place.read_bytes()[:-1])
    assert jit.cached_unit("swap_in", defines, "sm_90", tmp_path / "new") == first
    assert compiled == ["swap_in"] * 2
    assert [path.name for path in (tmp_path / "new").iterdir()] == [place.name], "temporary files are gone"


def test_cache_key_covers_all_inputs_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        jit.content_key("swap_in", DEFINES, "sm_90"),
        jit.content_key("swap_in", DEFINES, "sm_80"),
        jit.content_key("copy_rows", DEFINES, "sm_90"),
        jit.content_key("swap_in", DEFINES[1:], "sm_90"),
    }
    monkeypatch.setattr(jit, "SOURCE_DIR", with_another("memory.cuh", tmp_path))
    keys.add(jit.content_key("swap_in", DEFINES, "sm_90"))
    assert len(keys) == 5


def with_another(header: str, directory: Path) -> Path:
    """Write all headers to `directory`, `header` with one more line."""
    for path in jit.SOURCE_DIR.glob("*.cuh"):
        (directory / path.name).write_bytes(path.read_bytes() + b"\n" * (path.name == header))
    return directory


def test_cache_key_of_a_unit_holds_when_a_header_of_others_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """swap_in includes memory.cuh through three others, and nothing of the index."""
    keys = {unit: jit.content_key(unit, DEFINES, "sm_90") for unit in ("swap_in", "index_select")}
    monkeypatch.setattr(jit, "SOURCE_DIR", with_another("index_rows.cuh", tmp_path))
    assert jit.content_key("swap_in", DEFINES, "sm_90") == keys["swap_in"]
    assert jit.content_key("index_select", DEFINES, "sm_90") != keys["index_select"]


def test_compiler_gets_no_header_that_a_key_leaves_out() -> None:
    headers = {"a.cuh": '#pragma once\n #include "b.cuh"\n', "b.cuh": '#  include "a.cuh"\n', "c.cuh": ""}
    assert jit.included('// #include "c.cuh"\n#include "a.cuh"\n', headers).keys() == {"a.cuh", "b.cuh"}
    for unit in jit.UNITS:
        assert f"{unit}.cuh" in jit.included(f'#include "{unit}.cuh"\n', jit.headers_of_kernels())
    with pytest.raises(InternalError, match="cannot open source file"):
        jit.compile_source('#define LAYOUT "layout.cuh"\n#include LAYOUT\n', "another", (), "sm_90")


def test_build_fills_the_cache_with_what_workers_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by content: whatever the number of layers and of index groups, and the address of the pool."""
    compiled: list[str] = []

    def compile_tiny(unit: str, defines: jit.Defines, arch: str) -> jit.Compiled:
        compiled.append(unit)
        return jit.Compiled(b"a unit", ())

    monkeypatch.setattr(jit, "compile_unit", compile_tiny)
    monkeypatch.setenv("HISPARSE_KERNEL_CACHE", str(tmp_path / "kernels"))
    built = CliRunner().invoke(main, ["kernels", "build", "--arch", "sm_90"])
    assert built.exit_code == 0, built.output
    assert f"units for sm_90 lie in {tmp_path / 'kernels'}: {len(compiled)} were compiled in" in built.output
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700
    count = len(compiled)
    again = CliRunner().invoke(main, ["kernels", "build", "--arch", "sm_90"])
    assert ": 0 were compiled" in again.output
    rows = ((656, 132), (1152, 256), (352, 68), (196, 132), (320, 256))
    for layers, (row_bytes, key_bytes) in product((61, 78), rows):
        defines = jit.row_defines(Geometry(layers, row_bytes, tuple(range(layers)), key_bytes, 2048), 4096 * 1021)
        units: list[tuple[str, jit.Defines]] = [(unit, defines) for unit in ("copy_rows", "rows")]
        units += [("swap_in", (*defines, ("RANKS", ranks), ("DRAFT", draft))) for ranks in RANKS for draft in (0, 1)]
        units += [("begin_step", (*defines, ("DRAFTS", draft))) for draft in (0, 1)]
        for unit, needed in units:
            jit.cached_unit(unit, needed, "sm_90", tmp_path / "kernels")
    for indexer in (Indexer(16, 128, 2, 1), Indexer(16, 128, 2, 2), Indexer(32, 128, 2, 1, codes=True)):
        jit.cached_unit(indexer.unit(90), indexer.defines(90), "sm_90", tmp_path / "kernels")
    assert len(compiled) == count
    older = CliRunner().invoke(main, ["kernels", "build", "--arch", "sm_80"])
    assert older.exit_code == 0, older.output
    assert "index_hopper" not in compiled[count:], "rows of four bits are Hopper's"
    assert ARCHITECTURES == kernels_compile.ARCHITECTURES


def test_an_unwritable_cache_names_its_setting(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        jit.cached_unit("swap_in", (("SCALE", 1),), "sm_90", tmp_path / "file" / "cache")
    assert caught.value.field == "HISPARSE_KERNEL_CACHE"


def test_the_cache_is_made_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPARSE_KERNEL_CACHE", str(tmp_path / "own" / "kernels"))
    assert jit.cache_dir().stat().st_mode & 0o777 == 0o700
    jit.cache_dir().chmod(0o777)
    assert jit.cache_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("user", "mode", "taken"), [(0, 0o755, True), (0, 0o777, False), (7, 0o755, False)])
def test_a_cache_that_another_user_may_write_is_refused(
    user: int, mode: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISPARSE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(jit.os, "geteuid", lambda: 1_000)
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_uid=user, st_mode=0o040000 | mode))
    if taken:
        assert jit.cache_dir() == tmp_path
        return
    with pytest.raises(ConfigError, match="others may write it") as caught:
        jit.cache_dir()
    assert caught.value.field == "HISPARSE_KERNEL_CACHE"


def test_request_blocks_are_coresident_and_exchange_little() -> None:
    rows = (1, 3, 4, 13, 14, 18, 19, 24, 25, 44, 45, 66, 67)
    at_once = {16: 7, 8: 15, 5: 22, 4: 30, 2: 66}  # an H200
    assert [blocks_per_request(n, 2048, at_once.__getitem__) for n in rows] == [16, 16, 8, 8, 5, 5, 4, 4, 2, 2, 2, 2, 1]
    assert [blocks_per_request(n, 4096, at_once.__getitem__) for n in rows] == [16, 16, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 1]
    fewer = {16: 0, 8: 3, 5: 3, 4: 3, 2: 66}
    assert [blocks_per_request(n, 2048, fewer.__getitem__) for n in (1, 2, 3, 4)] == [8, 8, 2, 2]
    assert blocks_per_request(3, 2048, {**fewer, 2: 0}.__getitem__) == 8, "no refill blocks then"
    beside = [blocks_per_request(n, 2048, at_once.__getitem__, 66) for n in (1, 13, 16, 24, 33, 34, 64)]
    assert beside == [16, 5, 4, 2, 2, 1, 1], "half of the device is left to others"


def fake_driver(real: Any, most: int, queries: list[int]) -> SimpleNamespace:
    """The calls of a Kernel that launches in clusters, on a card that allows `most` blocks in one; `queries`: asked."""
    refused = real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
    larger = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED

    def most_active_clusters(_: str, config: Any) -> tuple[Any, int | None]:
        queries.append(next((int(attribute.value.clusterDim.x) for attribute in config.attrs), 1))
        return (refused, None) if queries[-1] > most else (real.CUresult.CUDA_SUCCESS, 132 // queries[-1])

    types = ("CUfunction_attribute", "CUdevice_attribute", "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    return SimpleNamespace(
        **{name: getattr(real, name) for name in types},
        cuModuleGetFunction=lambda *_: (0, "function"),
        cuFuncGetAttribute=lambda *_: (0, 768),
        cuCtxGetDevice=lambda: (0, 0),
        cuDeviceGetAttribute=lambda *_: (0, 99 * 1024),
        cuFuncSetAttribute=lambda _, attribute, __: (refused if attribute == larger and most <= 8 else 0,),
        cuOccupancyMaxActiveClusters=most_active_clusters,
    )


def test_cards_with_clusters_of_eight_at_most_have_none_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[int] = []
    driver = fake_driver(jit._bindings("driver"), 8, queries)
    monkeypatch.setattr(jit, "_bindings", lambda name: driver)
    kernel = jit.Kernel("module", "swap_in")
    kernel.allow_all(clusters=True)
    at_once = partial(kernel.clusters_at_once, shared_bytes=structures.SWAP_IN_SHARED_BYTES)
    assert [at_once(ranks) for ranks in (1, 2, 8, 16, 16)] == [132, 66, 16, 0, 0]
    assert queries == [1, 2, 8, 16], "a refusal is remembered, too"
    assert blocks_per_request(1, 2048, at_once) == 8


def test_refill_blocks_fit_beside_the_others_or_are_absent() -> None:
    assert [refill_clusters(rows, 5, 22) for rows in (1, 5, 6, 18, 19, 22, 23)] == [1, 1, 2, 4, 0, 0, 0]
    assert refill_clusters(44, 2, 66) == 22
    assert refill_clusters(45, 2, 66) == 0


def test_miss_plan_copies_fill_the_card_at_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang #34847: with a fixed grid of 4 blocks, what ran ahead fell behind past a few dozen requests."""
    grids: list[tuple[int, int]] = []
    kernel = SimpleNamespace(launch=lambda grid, *_, **__: grids.append(grid))
    for name, value in (("kernel_of", kernel), ("processors", 132), ("stream_of", None)):
        monkeypatch.setattr(sys.modules[replay_misses.__module__], name, lambda *_, value=value: value)
    monkeypatch.setattr(parameters, "state_parameters", lambda _: structures.State())
    for rows in (1, 8, 32, 256):
        replay_misses(cast("DeviceState", None), 0, MissPlan.allocate(rows, 4))
    assert grids == [(1, 1), (4, 1), (16, 1), (66, 1)]


def test_block_has_room_for_its_entries() -> None:
    assert structures.SWAP_IN_SHARED_BYTES <= 99 * 1024, "any device since sm_80"
    for k, ranks in product((1, 33, 2048, 2049, 2560, 2561, 4096), RANKS):
        entries = block_entries_of(k, ranks)
        assert k <= entries * ranks
        assert has_room(k, ranks) == (entries * ranks <= 4096)
        assert has_room(k, ranks) or (ranks == 5 and k > 2560)
        assert entries & (entries - 1) == 0
    with pytest.raises(BadInput) as caught:
        swap_in(cast("DeviceState", None), 0, torch.empty(1, 4096), *cast("Any", (None,) * 3), ranks=5)
    assert (caught.value.field, caught.value.value) == ("ranks", "5")


def test_pool_beyond_32_bit_ids_is_refused() -> None:
    check_pool(2**26, 2**32 - 1)
    for pages, page_bytes, field in ((2**26 + 1, 64, "host_pages"), (1, 2**32, "page_bytes")):
        with pytest.raises(BadInput) as caught:
            check_pool(pages, page_bytes)
        assert caught.value.field == field
