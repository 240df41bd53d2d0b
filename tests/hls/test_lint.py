"""Tests every rule of the lint with a kernel that breaks it; the project's own kernels break none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hls.description import KERNELS, SMARTSSD, ComputeUnit, Design, Kernel
from hls.lint import lint
from hls.sources import write_sources

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent / "lint_example"
KERNEL = "kernels/scale.cpp"
STEPS = "include/steps.hpp"
ADAMW_FILE = "sources/adamw_update.cpp"
GRADIENT, DECODE, PAYLOAD, ARRAYS, NUMBERS, CRC = (
    f"include/{name}.hpp" for name in ("gradient", "decode_gradient", "payload", "arrays", "number_formats", "crc32c")
)

# A function, a stream and a process of the example, as they have to be written.
SCALED = "float scaled(float value) { return value * 2.0f; }"
COMPUTED = """hls::stream<Beat> computed("computed");
#pragma HLS STREAM variable = computed depth = 64
#pragma HLS BIND_STORAGE variable = computed type = fifo impl = srl
"""
TAKE = """void take(hls::stream<Beat>& in) {
#pragma HLS INLINE off
    in.read();
}"""

Edit = Callable[..., list[str]]


@pytest.fixture
def findings(tmp_path: Path) -> Edit:
    """A function that replaces text in the example's files and returns what the lint finds."""
    shutil.copytree(EXAMPLE, tmp_path / "hls")
    design = Design(SMARTSSD.platform, (ComputeUnit(Kernel("scale", number=1, arrays=(), words=()), "scale_1"),))

    def edit(*replacements: tuple[str, str], file: str = KERNEL) -> list[str]:
        path = tmp_path / "hls" / file
        text = path.read_text()
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text)
        return [
            str(finding).removeprefix(f"{tmp_path}/hls/")
            for finding in lint(design, tmp_path / "hls/kernels", root=tmp_path)
        ]

    return edit


SLIPS = [
    [
        (GRADIENT, "emit(const float tile", "emit(float tile", "array tile has 2 producers"),
        (ADAMW_FILE, "load_array, exp_avg_in,", "load_array, master_in,", "pointer exp_avg_in is used by 0 processes"),
        (
            ADAMW_FILE,
            "port=parameter bundle=gmem4",
            "port=parameter bundle=gmem3",
            "bundle gmem3 is written by 2 processes",
        ),
        (GRADIENT, "#pragma HLS ARRAY_PARTITION", "// #pragma", "tile has no pragma ARRAY_PARTITION"),
        (GRADIENT, "#pragma HLS BIND_STORAGE", "// #pragma", "tile has no pragma BIND_STORAGE"),
        (GRADIENT, "#pragma HLS DATAFLOW", "#pragma HLS DATAFLOW\n#pragma HLS PIPELINE", "expand_blocks: PIPELINE of"),
        (ARRAYS, "II = 8", "II = 16", "load_array: PIPELINE with II=16: the loop has to keep up with 8"),
        (ARRAYS, "min = 0 max", "min = 262145 max", "pragma LOOP_TRIPCOUNT: min=262145 is more than max=262144"),
        (ARRAYS, "#pragma HLS UNROLL", "// #pragma", "write_status: an innermost loop has neither"),
        (ADAMW_FILE, "variable = counts depth = 8192", "variable = counts depth = 4096", "counts has depth 8192 in"),
        (ADAMW_FILE, "<Run, 2> runs_3(", "<Run, 1> runs_3(", "runs_3 has depth 1 in its type and 2 in its pragma"),
        (ADAMW_FILE, "#pragma HLS STREAM variable = dense", "// #pragma", "dense has no pragma STREAM"),
        (ARRAYS, "#pragma HLS INLINE off", "#pragma HLS INLINE", "the process load_array has no INLINE off"),
        (ADAMW_FILE, "#pragma HLS INTERFACE s_axilite", "// #pragma", "has no pragma INTERFACE s_axilite port=return"),
        (
            ADAMW_FILE,
            "#pragma HLS INTERFACE ap_ctrl_hs",
            "// #pragma",
            "has no pragma INTERFACE ap_ctrl_hs port=return",
        ),
        (ADAMW_FILE, "m_axi port=status", "s_axilite port=status", "has no pragma INTERFACE m_axi port=status"),
        (ADAMW_FILE, "num_read_outstanding=", "num_read_outstanding=0 //", "num_read_outstanding=0 is less than 1"),
        (
            ADAMW_FILE,
            "exp_avg_sq_out, new_exp_avg_sqs,",
            "exp_avg_sq_out, new_exp_avgs,",
            "stream new_exp_avg_sqs has 0 consumers",
        ),
        (ADAMW_FILE, "type = fifo", "type = ram_2p", "dense is bound to type=ram_2p: it takes fifo"),
        (ARRAYS, "II = 1\n", "II = 2\n", "write_status: PIPELINE with II=2: the loop has to keep up with 1"),
        (CRC, "II = 1\n", "II = 2\n", "PIPELINE with II=2: the loop has to keep up with 1"),
        (GRADIENT, "II = 1\n", "II = 8\n", "read_burst: PIPELINE with II=8: the loop has to keep up with 1"),
        (DECODE, "II = 1\n", "II = 8\n", "pair_entries: PIPELINE with II=8: the loop has to keep up with 1"),
        (ADAMW_FILE, "II = 8", "II = 9", "compute: PIPELINE with II=9: the loop has to keep up with 8"),
        (ADAMW_FILE, "variable = values depth = 32", "variable = values depth = 16", "values has depth 32 in"),
        (ADAMW_FILE, "#pragma HLS BIND_STORAGE variable = runs_2", "// #pragma", "runs_2 has no pragma BIND_STORAGE"),
        (NUMBERS, "#pragma HLS UNROLL", "// #pragma", "scaled_code: an innermost loop has neither PIPELINE nor"),
    ],
    [
        (ADAMW_FILE, "#pragma HLS DATAFLOW\n", "", "adamw_update: a block that calls 12 processes has no DATAFLOW"),
        (GRADIENT, "impl = uram", "impl = urma", "BIND_STORAGE: impl=urma is none of bram, srl, uram"),
        (GRADIENT, "type = ram_2p", "type = ram_p2", "tile is bound to type=ram_p2: it takes ram_2p"),
        (GRADIENT, "dim = 2", "dim = 1", "tile is partitioned into 4096 parts: 2 to 1024 may be"),
        (ARRAYS, "#pragma HLS LOOP_TRIPCOUNT", "// #pragma", "load_array: a loop whose bound is no constant has no"),
        (ADAMW_FILE, "INTERFACE ap_ctrl_hs", "INTERFACE ap_ctrl_chain", "pragma INTERFACE has no ap_ctrl_chain"),
        (ARRAYS, "II = 16", "II = 32", "store_parameter: PIPELINE with II=32: the loop has to keep up with 16"),
        (ADAMW_FILE, "II = 8", "II = kLanes", "compute: PIPELINE with II=kLanes: the loop has to keep up with 8"),
    ],
    [
        (ARRAYS, "#pragma HLS PIPELINE II = 8", "#pragma HLS UNROLL", "load_array: UNROLL of a loop whose bound is no"),
        (GRADIENT, " impl = uram", "", "tile is bound without impl="),
        (ARRAYS, "max = 262144", "max = 0", "pragma LOOP_TRIPCOUNT: max=0 is less than 1"),
        (GRADIENT, "dim = 2", "dim = 0", "tile is partitioned into 65536 parts"),
        (PAYLOAD, "kIndexBurst = 16", "kIndexBurst = 32", "values has depth 64 in its type and 32 in its pragma"),
        (ARRAYS, "#pragma HLS INLINE off", "", "the process write_status has no INLINE off"),
        (
            ADAMW_FILE,
            "variable = dense type = fifo impl = srl",
            "variable = dense type = fifo",
            "dense is bound without",
        ),
    ],
    [
        (ARRAYS, "std::uint32_t errors = 0;", "static std::uint32_t errors = 0;", "errors is static"),
        (
            NUMBERS,
            "const float even = word < kLanes / 2 ? lower[lane] : upper[lane];",
            "const Floats& half = word < kLanes / 2 ? lower : upper; const float even = half[lane];",
            "half refers to one of two variables: select the value",
        ),
        (ARRAYS, "Words beat;", "Words beat; __builtin_malloc(4);", "call of __builtin_malloc, which is neither"),
    ],
    [
        (GRADIENT, "#pragma HLS DATAFLOW\n", "", "expand_blocks: a block that calls 2 processes has no DATAFLOW"),
        (PAYLOAD, "kBlock = 65536", "kBlock = 32768", "counts has depth 16384 in its type and 8192 in its pragma"),
        (ARRAYS, "#pragma HLS PIPELINE", "// #pragma", "store_array: an innermost loop has neither PIPELINE nor"),
    ],
    [
        (GRADIENT, "dim = 2", "dim = 3", "tile is partitioned into 1 parts"),
    ],
]
"""Slips by file, old and new text, and what is found. Those of a list are made at once, and none hides another."""


@pytest.mark.parametrize("slips", SLIPS, ids=len)
def test_slips_in_the_projects_kernel_are_found(tmp_path: Path, slips: list[tuple[str, str, str, str]]) -> None:
    """The rules see through the macro that calls processes, and through templates."""
    for folder in ("include", "sim/include", "kernels"):
        shutil.copytree(ROOT / "hls" / folder, tmp_path / "hls" / folder)
    write_sources(tmp_path / "hls/sources")
    for file, old, new, _ in slips:
        path = tmp_path / "hls" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    design = Design(SMARTSSD.platform, (ComputeUnit(KERNELS[0], "adamw_update_1"),))
    found = [finding.message for finding in lint(design, tmp_path / "hls/sources", root=tmp_path)]
    assert [slip for slip in slips if not any(slip[3] in message for message in found)] == []


BROKEN = {
    # Pragmas
    "an unknown pragma": ("PIPELINE II = 8", "PIPELIME II = 8", "unknown pragma PIPELIME"),
    "a pragma of somebody else": ("#pragma HLS DATAFLOW", "#pragma HSL DATAFLOW", "unknown pragma .*HSL"),
    "an unknown option": ("UNROLL factor", "UNROLL times", "UNROLL has no times="),
    "an unknown word": ("beat complete", "beat completely", "ARRAY_PARTITION has no completely"),
    "no number": ("factor = 2", "factor = kMany", "factor=kMany is neither a number nor a constant"),
    "no number for requests": (
        "max_read_burst_length = 64",
        "num_read_outstanding = four",
        "num_read_outstanding=four is neither a number nor a constant",
    ),
    "no number for what is written": (
        "max_write_burst_length = 64",
        "num_write_outstanding = four",
        "num_write_outstanding=four is neither a number nor a constant",
    ),
    "a pragma outside": ("namespace {", "#pragma HLS INLINE\nnamespace {", "INLINE stands outside of every function"),
    "a loop's pragma without a loop": (
        "out.write(beat);\n    }",
        "out.write(beat);\n    }\n#pragma HLS LOOP_TRIPCOUNT min = 1\n",
        "LOOP_TRIPCOUNT does not stand in a loop's body",
    ),
    "an unknown variable": ("variable = loaded", "variable = laoded", "no variable laoded in scale"),
    "no variable": ("STREAM variable = loaded", "STREAM", "STREAM names no variable"),
    "an unknown port": ("port = values_in", "port = value_in", "scale has no port value_in"),
    "an unknown mode": ("INTERFACE s_axilite", "INTERFACE s_axi", "INTERFACE has no s_axi"),
    "no mode": ("INTERFACE s_axilite port = return", "INTERFACE port = beats", "INTERFACE names no mode"),
    "a master for what is returned": ("s_axilite port = return", "m_axi port = return", "return cannot be m_axi"),
    "a master for a word": ("s_axilite port = return", "m_axi port = beats", "m_axi port beats is no pointer"),
    "a burst across 4 KiB": (
        "max_read_burst_length = 64",
        "max_read_burst_length = 128",
        "max_read_burst_length=128 beats of 64 bytes are more than the 4096",
    ),
    "a burst by name": (
        "max_read_burst_length = 64",
        "max_read_burst_length = kDepth",
        "max_read_burst_length=kDepth has to be a number",
    ),
    "a write burst on what is read": (
        "max_read_burst_length",
        "max_write_burst_length",
        "values_in is read only, but has max_write_burst_length",
    ),
    # DATAFLOW
    "a stream without a consumer": (
        "store(values_out, computed, beats);",
        "store(values_out, loaded, beats);",
        r"stream computed has 0 consumers: it takes one",
    ),
    "a stream with two consumers": (
        "store(values_out, computed, beats);",
        "store(values_out, loaded, beats);",
        r"stream loaded has 2 consumers \(compute \(line \d+\), store \(line \d+\)\)",
    ),
    "a stream with two producers": (
        "load(values_in, loaded, beats);",
        "load(values_in, computed, beats);",
        r"stream computed has 2 producers \(load \(line \d+\), compute \(line \d+\)\)",
    ),
    "a pointer in two processes": (
        "compute(loaded, computed, beats);",
        "load(values_in + 1, computed, beats);",
        r"pointer values_in is used by 2 processes",
    ),
    "a pointer in no process": ("store(values_out, computed, beats);", "", "pointer values_out is used by 0 processes"),
    "a call that returns something": (
        "    load(values_in",
        "    const float factor = scaled(2.0f);\n    load(values_in",
        "scale: a DATAFLOW region may hold declarations and calls of functions only",
    ),
    "something else than calls": (
        "    load(values_in",
        "    if (beats > 0) load(values_in",
        "scale: a DATAFLOW region may hold declarations and calls of functions only",
    ),
    # Synthesis
    "new": ("return value * 2.0f;", "return *new float(value);", "new cannot be synthesised"),
    "delete": ("return value * 2.0f;", "delete &value; return value;", "delete cannot be synthesised"),
    "throw": ("return value * 2.0f;", "throw value;", "throw cannot be synthesised"),
    "try": ("return value * 2.0f;", "try { return value; } catch (...) { return 0; }", "try cannot be synthesised"),
    "goto": ("return value * 2.0f;", "goto end; end: return value;", "goto cannot be synthesised"),
    "recursion": ("return value * 2.0f;", "return scaled(value);", "scaled calls itself"),
    "recursion of two": (
        SCALED,
        "float scaled(float); float again(float value) { return scaled(value); } "
        "float scaled(float value) { return again(value); }",
        "scaled calls itself",
    ),
    "a call through a pointer": (
        "return value * 2.0f;",
        "float (*rule)(float) = scaled; return rule(value);",
        "a call through the pointer rule cannot be synthesised",
    ),
    "a virtual function": (
        SCALED,
        "struct Rule { virtual float apply(float value) { return value; } }; "
        "float scaled(float value) { return Rule().apply(value); }",
        "apply is virtual",
    ),
    "a double constant": ("2.0f", "2.0", "double precision: write float"),
    "a double variable": ("return value * 2.0f;", "double twice = value; return 1;", "double precision: write float"),
    "a double between": ("return value * 2.0f;", "return float(double(value) * 2);", "double precision: write float"),
    "a loop without an end": ("lane = 0; lane < 16; ++lane", "lane = 0;; ++lane", "compute: a loop is no for"),
    "a variable size": (
        "return value * 2.0f;",
        "const int size = int(value); int a[size]; return 1;",
        "the size of a is no c",
    ),
    "a global variable": (
        "float scaled(float value) { return value",
        "float last; float scaled(float value) { last = value; return value",
        "last belongs to no function",
    ),
    "a cast of pointers": (
        "return value * 2.0f;",
        "return *reinterpret_cast<int*>(&value);",
        "reinterpret_cast cannot be synthesised",
    ),
    "a dynamic cast": (
        "float scaled(float value) { return",
        "struct Rule { virtual ~Rule(); }; struct More : Rule {}; "
        "float scaled(float value) { Rule* rule = nullptr; if (dynamic_cast<More*>(rule)) return value; return",
        "dynamic_cast cannot be synthesised",
    ),
    "a computed goto": (
        "return value * 2.0f;",
        "void* to = &&end; goto *to; end: return value;",
        "goto cannot be synthesised",
    ),
    "assembler": ("return value * 2.0f;", 'asm(""); return value;', "assembler cannot be synthesised"),
    "a function of C's library": (
        f"namespace {{\n\n{SCALED}",
        '#include <cstdio>\nnamespace {\nfloat scaled(float value) { std::printf("%f", value); return value; }',
        "call of printf, which is neither the project's nor the toolchain's",
    ),
    "type information": (
        f"namespace {{\n\n{SCALED}",
        "#include <typeinfo>\nnamespace {\n"
        "float scaled(float value) { return &typeid(value) == &typeid(int) ? value : 0.0f; }",
        "typeid cannot be synthesised",
    ),
    "what does not compile": ("return value * 2.0f;", "return valeu;", "does not compile: .*valeu"),
}


@pytest.mark.parametrize(("old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_kernel(findings: Edit, old: str, new: str, message: str) -> None:
    """Each fault is found and named."""
    found = findings((old, new))
    assert any(re.search(message, finding) for finding in found), found


def test_what_only_simulation_sees_is_not_looked_at(findings: Edit) -> None:
    """Between `#ifndef __SYNTHESIS__` and `#endif` anything may stand, pragmas too."""
    simulated = "#ifndef __SYNTHESIS__\n#pragma HLS NONSENSE\n    throw value;\n#endif\n    return value * 2.0f;\n"
    assert findings(("return value * 2.0f;", f"\n{simulated}")) == []


def test_headers_are_checked_where_the_kernel_includes_them(findings: Edit) -> None:
    """A finding in a header has the header's own path and line."""
    found = findings(("target[i] = in.read();", "target[i] = *new T(in.read());"), file=STEPS)
    assert found == ["include/steps.hpp:27: new cannot be synthesised"]


@pytest.mark.parametrize("num_floats", [12, 64])
def test_a_port_of_odd_width_is_found(findings: Edit, num_floats: int) -> None:
    """AXI ports are 8 to 1024 bits wide, a power of two."""
    beat = f"struct Beat {{ float lanes[{num_floats}]; float& operator[](int lane) {{ return lanes[lane]; }} }};"
    found = findings(("using Beat = hls::vector<float, 16>;", beat), file=STEPS)
    assert any(f"m_axi port values_in is {num_floats * 32} bits wide: not a power" in finding for finding in found)


def test_streams_are_followed_through_functions_and_arrays(findings: Edit) -> None:
    """A process that only hands a stream on is a consumer if the one it calls is; streams of an array count apart."""
    array = (
        ('hls::stream<Beat> loaded("loaded")', "hls::stream<Beat> s[2]"),
        ("STREAM variable = loaded", "STREAM variable = s"),
        ("BIND_STORAGE variable = loaded", "BIND_STORAGE variable = s"),
        (COMPUTED, ""),
        ("load(values_in, loaded", "load(values_in, s[0]"),
        ("compute(loaded, computed", "compute(s[0], s[1]"),
        ("store(values_out, computed", "keep(values_out, s[1]"),
        (
            "}  // namespace",
            "void keep(Beat* to, hls::stream<Beat>& s, std::uint32_t n) {\n"
            "#pragma HLS INLINE off\nstore(to, s, n);\n}\n}  // namespace",
        ),
    )
    findings(("explicit stream(const char*) {}", "stream() {}"), file="sim/include/hls_stream.h")
    assert findings(*array) == []
    found = findings(("keep(values_out, s[1]", "keep(values_out, s[0]"))
    assert [re.sub(r" \(.*\)", "", f.split(": ", 1)[1]) for f in found] == [
        "stream s[0] has 2 consumers: it takes one",
        "stream s[1] has 0 consumers: it takes one",
    ]


def test_dataflow_below_the_top_knows_the_tops_masters(findings: Edit) -> None:
    """A top may hold interfaces only, and call the function with the processes, whose pointers have other names."""
    streams = "".join(COMPUTED.replace("computed", name) for name in ("loaded", "more", "computed"))
    body = """    load(from, loaded, beats);
    load(second, more, beats);
    compute(loaded, computed, beats);
    take(more);
    store(to, computed, beats);
"""
    flow = f"""
{TAKE}

void flow(const Beat* from, const Beat* second, Beat* to, std::uint32_t beats) {{
#pragma HLS DATAFLOW
{streams}{body}}}

}}  // namespace
"""
    text = (EXAMPLE / KERNEL).read_text()
    rest = text[text.index("#pragma HLS DATAFLOW") :]
    found = findings(
        ("}  // namespace", flow),
        (rest, "    flow(values_in, values_in, values_out, beats);\n}\n"),
    )
    assert [re.sub(r" \(.*\)", "", f.split(": ", 1)[1]) for f in found] == [
        "bundle gmem0 is read by 2 processes: one may"
    ]


def test_a_described_kernel_without_a_source_is_found(tmp_path: Path) -> None:
    """A source file that the description names is reported if it is missing."""
    assert [finding.message for finding in lint(SMARTSSD, tmp_path)] == ["is missing"] * 3
