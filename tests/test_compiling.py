"""What a build compiles for which architecture (build_backend/compiling.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))
import compiling  # noqa: E402

FLAGS = ["-O3", *(f"-gencode=arch=compute_{a},code={c}" for a, c in (("75", "sm_75"), ("90", "compute_90")))]
HOPPER = "-gencode=arch=compute_90,code=sm_90"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Writes CUDA files into a csrc/cuda of their own: tree({name: text}) returns its folder."""
    monkeypatch.setattr(compiling, "CSRC", tmp_path / "csrc")

    def write(texts):
        for name, text in texts.items():
            path = tmp_path / "csrc" / "cuda" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "csrc" / "cuda"

    return write


def test_flags_for_sm90a():
    assert compiling.for_sm90a([*FLAGS, HOPPER]) == [
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DCUDA_OPS_SM90A=1",
    ]


def test_flags_stay_where_9_0_is_not_asked_for():
    assert compiling.for_sm90a(FLAGS) == FLAGS


# What CI asks for: 7.5, 8.0 and 9.0, and PTX for newer devices.
CI = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (75, 80, 90)] + ["-gencode=arch=compute_90,code=compute_90"]
COMPUTE_80 = [f"-gencode=arch=compute_80,code={code}" for code in ("sm_80", "sm_90", "compute_80")]


def test_one_front_end_serves_all_from_8_0_on():
    assert compiling.from_one_front_end(["-O3", *CI]) == ["-O3", CI[0], *COMPUTE_80]
    newer = [f"-gencode=arch=compute_{a},code={c}" for a, c in ((90, "sm_90"), (120, "sm_120"), (120, "compute_120"))]
    ours = [f"-gencode=arch=compute_90,code={c}" for c in ("sm_90", "sm_120", "compute_90")]
    assert compiling.from_one_front_end(newer) == ours
    for alone in (["-O3"], CI[:1], ["-gencode=arch=compute_90a,code=sm_90a"]):
        assert compiling.from_one_front_end(alone) == alone


def test_turing_is_left_out_where_there_is_more():
    assert compiling.without_turing(["-O3", *CI]) == ["-O3", *CI[1:]]
    assert compiling.without_turing(["-O3", CI[0]]) == ["-O3", CI[0]]
    assert compiling.without_turing(["-gencode=arch=compute_120,code=sm_120"]) == [
        "-gencode=arch=compute_120,code=sm_120"
    ]


def test_ptx_of_turing_is_not_made_of_what_later_devices_take(tree):
    """They would run it, without cp.async and mma.sync."""
    turing = [f"-gencode=arch=compute_75,code={code}_75" for code in ("sm", "compute")]
    files = tree(dict.fromkeys(("relu.cu", "gemm/mma/kernel.cu", "attention/forward_sm80.cu"), ""))
    assert compiling.flags_for(files / "relu.cu", turing) == turing
    for name in ("gemm/mma/kernel.cu", "attention/forward_sm80.cu"):
        assert compiling.flags_for(files / name, turing) == turing[:1]


SM90A = ["-gencode=arch=compute_90a,code=sm_90a", "-DCUDA_OPS_SM90A=1"]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("softmax.cu", [CI[0], *COMPUTE_80]),
        ("gemm/gemm.cu", [CI[0], *COMPUTE_80]),
        # 9.0's own: a folder, a file, a word of either.
        ("gemm/sm90/bfloat16.cu", SM90A),
        ("gemm/sm90_skinny/bfloat16.cu", SM90A),
        ("linear_relu/sm90.cu", SM90A),
        ("gemm/ladder/12_tma_wgmma_sm90.cu", SM90A),
        # From 8.0 on.
        ("gemm/mma/bfloat16.cu", COMPUTE_80),
        ("gemm/direct/mma.cu", COMPUTE_80),
        ("conv_bn_relu_pool/tiled_sm80/convolve.cu", COMPUTE_80),
        ("conv2d/few_channels/forward_sm80.cu", COMPUTE_80),
        # A word, not some letters of one.
        ("wgmma.cu", [CI[0], *COMPUTE_80]),
        ("gemm/mmap/sm900.cu", [CI[0], *COMPUTE_80]),
    ],
)
def test_a_files_name_tells_its_architectures(name, expected, tree):
    # What the text says of them is of no account.
    assert compiling.flags_for(tree({name: "// CUDA_OPS_SM90A sm80 mma\n"}) / name, CI) == expected


def test_what_lies_around_the_repository_tells_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "sm90" / "csrc" / "cuda"
    folder.mkdir(parents=True)
    (folder / "square.cu").write_text("")
    monkeypatch.setattr(compiling, "CSRC", tmp_path / "sm90" / "csrc")
    assert compiling.flags_for(folder / "square.cu", CI) == [CI[0], *COMPUTE_80]


SOURCES = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(ROOT / "csrc" / "cuda").as_posix())
def test_code_for_sm90a_lies_in_files_of_that_name(source):
    """In any other file the code between #if and #endif would be compiled for nothing."""
    texts = compiling.with_includes(source).values()
    names_it = any(re.search("CUDA_OPS_SM90A|__CUDA_ARCH_FEAT_SM90_ALL", text) for text in texts)
    assert names_it == bool(compiling.words(source) & compiling.SM90A)


def test_one_front_end_for_files_that_choose_by_no_architecture(tree):
    folder = tree(
        {
            "common/common.cuh": "#if __CUDA_ARCH__ >= 900\n#endif\nwait_for_predecessor();\n",
            "waits.cuh": '#include "common/common.cuh"\n    release_successor();\n',
            "plain.cu": '#include "common/common.cuh"\n#include "missing.h"\n',
            "dependent.cu": '#include "common/common.cuh"\nwait_for_predecessor();\n',
            "through_a_header.cu": '#include "waits.cuh"\n',
            "chooses.cu": "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n",
            "both_sm80.cu": "    release_successor();\n",
        }
    )
    assert {path.stem: compiling.flags_for(path, CI) for path in sorted(folder.glob("*.cu"))} == {
        "plain": [CI[0], *COMPUTE_80],
        "dependent": CI,
        "through_a_header": CI,
        "chooses": CI,
        "both_sm80": CI[1:],
    }
    # One architecture: nothing to tell apart.
    for flags in (CI[:1], ["-gencode=arch=compute_90a,code=sm_90a"]):
        assert all(compiling.flags_for(path, flags) == flags for path in folder.glob("*.cu"))


def test_without_a_gpu_all_from_8_0_on_find_code(tmp_path):
    # Machine code for 9.0, and PTX of 8.0 for those before and, from one front end, for those to come.
    assert compiling.from_one_front_end(compiling.WITHOUT_GPU) == [COMPUTE_80[2], COMPUTE_80[1]]
    assert compiling.without_turing(compiling.WITHOUT_GPU) == compiling.WITHOUT_GPU
    assert compiling.for_sm90a(compiling.WITHOUT_GPU)[-2] == "-gencode=arch=compute_90a,code=sm_90a"


def test_longer_files_come_first(tmp_path):
    (tmp_path / "common.cuh").write_text("// much\n" * 100)
    for name, text in {"short.cu": "//\n", "long.cu": '#include "common.cuh"\n', "some.cu": "// some\n"}.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("short.cu", "long.cu", "some.cu")]
    assert compiling.longest_first(paths) == [paths[1], paths[2], paths[0]]


def test_glue_is_compiled_as_two_files_that_stay_as_they_are(tmp_path):
    for name, text in {"b.cpp": "", "a.cpp": "#include <torch/csrc/autograd/function.h>\n", "c.cpp": ""}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (str(tmp_path / name) for name in ("a.cpp", "b.cpp", "c.cpp"))
    units = [Path(unit) for unit in compiling.glue_units([c, a, b], tmp_path / "glue")]
    assert [unit.read_text() for unit in units] == [f'#include "{a}"\n', f'#include "{b}"\n#include "{c}"\n']
    before = [unit.stat().st_mtime_ns for unit in units]
    assert compiling.glue_units([b, c, a], tmp_path / "glue") == [str(unit) for unit in units]
    assert [unit.stat().st_mtime_ns for unit in units] == before
    assert compiling.glue_units([b], tmp_path / "glue") == [str(units[1])]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A file of C and its header, in a folder whose name a build file has to escape."""
    folder = tmp_path / "a b: $c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("one.h").write_text("#define ONE 1\n")
    Path("one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    return [("one.c", str(folder / "one.o"), ["cc", '-DQUOTED="$1 2"'])]


def test_what_has_changed_is_compiled_again(project, capfd):
    def compiled():
        compiling.compile_all(project, "temp", "2")
        return "compiling one.c" in capfd.readouterr().out

    assert compiled()
    assert not compiled()
    Path("one.h").write_text("#define ONE 2\n")  # found through the compiler's own list
    assert compiled()
    project[0][2].append("-O1")
    assert compiled()
    assert not compiled()


NOISE = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 6833 by compiler to allow use of registers"
TOLD = [
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
    "ptxas warning : (C7519) something else",
    "file.cu(7): warning #177-D: variable was declared but never referenced",
    f"note: {NOISE}",
]


@pytest.mark.parametrize("status", [0, 3])
def test_of_what_a_compiler_says_one_kind_of_line_is_left_out(status, tmp_path):
    lines = [NOISE, TOLD[0], TOLD[1], NOISE, NOISE, TOLD[2], TOLD[3], NOISE]
    code = "import sys\n" + "".join(
        f"print({line!r}, file=sys.{'stderr' if i % 2 else 'stdout'}, flush=True)\n" for i, line in enumerate(lines)
    )
    command = compiling.without_noise([sys.executable, "-c", f"{code}sys.exit({status})"])
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == status
    assert result.stdout.splitlines() == TOLD


def test_a_broken_file_ends_the_build(project, capfd):
    Path("one.c").write_text("int one(void) { return nothing; }\n")
    with pytest.raises(SystemExit, match="compiling failed"):
        compiling.compile_all(project, "temp", "1")
    assert "one.c:1" in capfd.readouterr().out


def test_without_ninja_the_cure_is_named(project, monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="pip install ninja"):
        compiling.compile_all(project, "temp", "1")
