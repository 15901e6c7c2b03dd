"""Whatever a user writes, in an override, a yaml file or a run's name, is a valid plan or one line.

`FUZZ=20 pytest tests/cli/test_fuzz.py` tries twenty times as much.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.cli import main
from arborl.config import groups, knobs, load_config, options, presets, read_config, save_config
from arborl.config.schema import Config
from arborl.core.errors import InputError
from arborl.engine.cost import forecast
from arborl.engine.method import check_plan, warnings_about
from arborl.run.folder import check_folder
from arborl.trainer import train

MORE = int(os.environ.get("FUZZ", "1"))


def words(text: str) -> list[str]:
    return text.split()


KNOBS = {key.replace("<name>", "x"): item for key, item in knobs()}
KEYS = sorted(KNOBS)
SHAPE = [key for key in KEYS if key.split(".")[0] in ("tree", "sample", "prune", "kernel", "advantage", "seed")]
SHAPE += ["train.epochs", "train.max_seconds", "eval.num_steps", "eval.num_prompts"]
"""What a plan is made of."""
ODD_KEYS = words(
    """tree sample rewards rewards. rewards.x rewards..fn rewards.a.b.fn a..b . tree. TREE.w tree.ww tree/w model/x
    hydra hydra.run.dir hydra.searchpath hydra/launcher defaults _target_ _self_ schema +tree.w ++tree.w ~tree.w ~model
    ~rewards ~rewards.x ~rewards.x.fn ~rewards.scene tree@x algo@model +algo@x +model tree[w] tree.split_points[0]
    tree.split_points.0 rewards.ü.fn rewards.1.fn rewards.true.fn rewards.null.fn rewards.items.fn rewards.<name>.fn
    rewards.__class__.fn $ ${seed} @ # -x --x"""
)
ODD_KEYS += ["", " tree.w", "tree .w", "\0", "\n", "tree.w\n", "rewards.a b.fn"]
COUNTS = [0, 1, 2, 3, 4, 5, 8, 16, 50, 300, 1000, 10**5, 10**9, 2**31, 10**12, 10**18, 2**63, 10**30, 10**400]
INTEGERS = [*map(str, COUNTS), "-1", str(-(10**18)), str(-(10**400)), "1_000", "0x10", "007", "9" * 5000]
FLOATS = words("0.5 2.5 -0.5 1e-9 1e-45 1e-320 1e9 1e18 1e300 1e308 1e400 -1e400 nan inf -inf NaN .5 5. 1e +1")
LISTS = words("[] [0] [1] [1,2] [1,1] [5,6] [9] [-1] [1.5] [a,b] [null] [true] [[1]] [???] [${seed}] [{a:1}]")
LISTS += [f"[{10**9}]", f"[{10**30}]", "[" * 80 + "]" * 80, "[" * 3000, "[1," * 500]
PYTHON = "!!python/object/apply:os.system [touch pwned]"
TEXTS = words(
    """'' "" a true false null None ~ ??? auto none lora full tree flat branch mix comb depth prompt siblings flow_sde
    dance_sde cps ddim euler dpmpp_2m shift pipeline scenes mixture sd3 flux wan sd sdxl hps http://x os:system a:b
    a.b:c arborl.models:Model {} {a:1} {w:1} {1:2} {[1]:2} {a:{b:{c:1}}} ${seed} ${tree.w} ${tree} ${run_name} ${nope}
    ${nope:1} ${ ${} ${.} ${..seed} \\${seed} '${seed}' a${seed}b ${oc.env:HOME} ${oc.env:NOT_THERE}
    ${oc.decode:'[1,2]'} ${oc.decode:'['} ${oc.create:{a:1}} ${oc.select:tree.w} ${oc.dict.keys:tree} ${now:%Y}
    ${hydra:runtime.cwd} a,b 1,2,3 choice(1,2) range(1,3) glob(*) interval(0,1) shuffle(1,2) int(3) str(3) float(x)
    json_str('{') ../x /etc/passwd C:\\x a/b .. . 日本 😀 \ud800 ' " 'a "a"b &a *a = == a=b"""
)
TEXTS += [
    "\0",
    "\n",
    "a\nb",
    "a\r\nb",
    "\t",
    "\x1b[31m",
    "\u2028",
    "- 1",
    "a: b",
    "a" * 400,
    "a" * 10**5,
    "{" * 200,
    PYTHON,
]
NASTY = [*INTEGERS, *FLOATS, *LISTS, *TEXTS]


def outcome(make: Callable[[], Config]) -> str:
    """What is said of it: a plan is "", and only an `InputError` of one printable line may be raised."""
    try:
        config = make()
        check_plan(config)
        forecast(config)
        warnings_about(config)
    except InputError as error:
        line = str(error)
    else:
        return ""
    assert line.isprintable(), repr(line)
    assert 0 < len(line) < 10_000
    return line


def fitting(key: str) -> list[str]:
    """Values of the kind that a key takes, of any size."""
    if key in groups():
        return options(key)
    if key not in KNOBS:
        return NASTY
    if choices := KNOBS[key].metadata["choices"]:
        return [*choices]
    kinds = {
        "bool": ["true", "false"],
        "list": words("[] [1] [2] [1,2] [5,6] [9] [3,1]"),
        "int": [*map(str, COUNTS[1:])],
    }
    kinds |= {"float": words("0.1 0.5 0.7 1 2.5 1e-9 1e-320 1e9 1e300")}
    return next((values for kind, values in kinds.items() if kind in str(KNOBS[key].type)), TEXTS)


@st.composite
def overrides(draw: st.DrawFn) -> str:
    key = draw(st.one_of(*map(st.sampled_from, (SHAPE, KEYS, groups(), ODD_KEYS)), st.text(max_size=8)))
    value = draw(st.one_of(st.sampled_from(fitting(key)), st.sampled_from(NASTY), st.text(max_size=8)))
    return draw(st.sampled_from([f"{key}={value}"] * 30 + [key, value]))


@st.composite
def shapes(draw: st.DrawFn) -> list[str]:
    keys = draw(st.lists(st.sampled_from(SHAPE), min_size=1, max_size=6))
    return [
        f"algo={draw(st.sampled_from(options('algo')))}",
        *(f"{k}={draw(st.sampled_from(fitting(k)))}" for k in keys),
    ]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory):
    """An empty working folder. Nothing that is tried may write into it."""
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    assert [*folder.glob("*pwned*")] == []


SLIPS = {
    "more steps than memory": (["sample.num_steps=1000000000"], "sample.num_steps=1000000000: .*at most 1000"),
    "more steps to evaluate": (["eval.num_steps=1000000000"], "eval.num_steps=1000000000: .*at most 1000"),
    "pictures without end": (["eval.num_prompts=1000000000000"], "eval.num_prompts=1000000000000: .*at most"),
    "prompts without end": (["sample.num_prompts=1000000000000"], "sample.num_prompts=1000000000000: .*at most"),
    "and over all processes": (["sample.prompts_per_epoch=1000000000000"], "sample.prompts_per_epoch=1000000000000: "),
    "leaves without end": (["tree.max_leaves=1000000000000"], "tree.max_leaves=1.*at most 4096"),
    "children without end": (["tree.k=1000000000000"], "tree.max_leaves=1024: the plan has 10000000"),
    "a long way for a window": (["sample.num_steps=1000", "tree.s=1"], "sample.num_steps=1000: .* places"),
    "splits without end": (["algo=branch", "tree.split_points=[]", f"tree.split_rounds={10**12}"], "1[.][.]"),
    "depths that slide for ever": (["prune.depth=[1000000000]", "prune.depth_slide=true"], "prune.depth=.1000000000"),
    "and at every place of a window": (
        ["tree.s=1", "sample.num_steps=150", "prune.depth=[149]", "prune.depth_slide=true", "train.epochs=100000000"],
        "prune.depth=.149.: moves 149 times",
    ),
    "more than 64 bits": ([f"train.epochs={10**400}"], "train.epochs: .* more than 64 bits"),
    "and in a list": ([f"prune.depth=[{10**30}]"], "prune.depth: .* more than 64 bits"),
    "beyond floats": ([f"loss.clip={10**400}"], "loss.clip=1000.*cannot be read"),
    "beyond what is computed with": (["loss.clip=1e300"], "loss.clip=1e.300: .*up to 1e.30"),
    "and below": (["rewards.x.weight=-1e300"], "rewards.x.weight=-1e.300: .*up to 1e.30"),
    "longer than a socket waits": (["rewards.x.timeout=1e30"], "rewards.x.timeout=1e.30: .*at most 1000000"),
    "more digits than Python reads": (["seed=" + "9" * 5000], "override=seed=999.*…: cannot be read"),
    "a shift that leaves no levels": (["sample.sigmas=shift", "sample.shift=1e29"], "sample.shift=1e.29"),
    "one step of a scheduler": (["sample.num_steps=1"], "sample.num_steps=1: "),
    "lists in lists": (["tree.split_points=" + "[" * 300 + "]" * 300], "tree.split_points="),
    "a list that is none": (["prune.depth=${tree.w}"], "prune.depth=.*a list, such as"),
    "several values": (["tree.w=1,2"], "tree.w=1,2: is more than one value"),
    "a mapping": (["rewards.x.url={a:1}", "tree.w=0"], "tree.w=0"),
    "a name that is too long": (["log.dir=" + "a" * 300], "log.dir=aaa.*File name too long"),
    "and of a model": (["model.path=" + "a" * 300], "model.path=aaa"),
    "a NUL": (["sample.negative_prompt='a\0'"], r"sample.negative_prompt=a\\x00: "),
    "half a letter": (["log.dir='\ud800'"], r"log.dir=\\ud800: "),
    "a knob deleted": (["~tree.w"], "tree.w: cannot be deleted"),
    "an environment variable that is not there": (["run_name=${oc.env:NOT_THERE}"], "NOT_THERE"),
    "two that name each other": (["tree.w=${tree.k}", "tree.k=${tree.w}"], "tree.[wk]"),
    "neither number nor word": (["sample.batch_size=car"], "sample.batch_size=car: .*1 or more, or auto"),
}


class TestOverrides:
    @settings(max_examples=60 * MORE)
    @given(preset=st.sampled_from(presets()), given=st.lists(overrides(), min_size=1, max_size=4))
    def test_any_are_a_plan_or_one_line(self, preset: str, given: list[str]):
        outcome(lambda: load_config(preset, given))

    @settings(max_examples=25 * MORE)
    @given(given=shapes())
    def test_any_shape_is_a_plan_or_one_line(self, given: list[str]):
        outcome(lambda: load_config("mixture", given))

    @pytest.mark.parametrize("name", SLIPS)
    def test_some_that_once_were_something_else(self, name: str):
        given, said = SLIPS[name]
        line = outcome(lambda: load_config("tree", given))
        assert re.search(said, line), line


LIMITS = {  # each with what it is tried at
    "loss.clip": "1e30",
    "loss.adv_clip": "1e30",
    "train.learning_rate": "1e30",
    "train.max_grad_norm": "1e30",
    "loss.kl": "1e30",
    "advantage.temperature": "1e-320",
}


@pytest.mark.parametrize("key", LIMITS)
def test_what_is_allowed_can_be_computed_with(key: str, tmp_path: Path):
    """Up to the largest number, and down to the smallest: a run, or one line that says what came of it."""
    small = ["train.epochs=1", "eval.num_prompts=1", "log.record_every=0", "log.trackers=[]", f"log.dir={tmp_path}"]
    with suppress(InputError):
        assert (train(load_config("mixture", [*small, f"{key}={LIMITS[key]}"])) / "summary.json").is_file()


SCALARS = [*TEXTS, *INTEGERS, *FLOATS, "[]", "[1, 2]", "[[1]]", "{a: 1}", "{1: 2}", "{null: 1}", "{[1]: 2}", "'???'"]
SCALARS += [
    "2001-01-01",
    "1:1:1",
    ".nan",
    ".inf",
    "0x" + "f" * 6000,
    "&x 3",
    "*x",
    "&a [*a]",
    "&a {b: *a}",
    "<<",
    "? a",
]
SCALARS += [
    "!!binary aGk=",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!int x",
    "!!float x",
    "!!timestamp x",
    "!own 1",
    "|\n   a",
]
SCALARS += ["!!python/name:os.system", "'${tree}'", "{<<: {a: 1}}", '"\\0"', '"\\ud800"', '"\\n"']
DEFAULTS = words(
    """tree schema _self_ nope mine 1 null [tree] {} ~ @x é '' '.' '..' '/' ../tree ../../etc/passwd /tree tree@a.b
    ${oc.env:HOME} ${oc.env:PATH} model:"""
)
DEFAULTS += [
    "model: scenes",
    "model: nope",
    "model: ../tree",
    "/model: scenes",
    "override model: scenes",
    "model: null",
]
DEFAULTS += ["optional model: nope", "rewards: [scene, hps]", "algo@x: tree", "model@: scenes", "tree: {a: 1}", "/: x"]
DEFAULTS += ["override hydra/launcher: x", "model: [a, {b: c}]", "model/x: y", "_self_: 1", "model: ${x}", PYTHON]
HEADS = [
    "# @package tree",
    "# @package",
    "# @package ..",
    "%YAML 1.2\n---",
    "%TAG ! x",
    "---",
    "\ufeff",
    "hydra: 1",
    "- 1",
]


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """A yaml file much as a user's, with some things in it that are not."""
    rare = st.integers(0, 9).map(lambda n: n == 9)
    lines = [draw(st.sampled_from(HEADS))] if draw(rare) else []
    lines += [f"defaults: {draw(st.sampled_from(SCALARS))}" if draw(rare) else "defaults:\n  - mixture"]
    lines += [f"  - {draw(st.sampled_from(DEFAULTS))}"] if draw(rare | rare) else []
    lines += ["  - _self_"] if not draw(rare) else []
    keys = st.sampled_from([*KEYS, "x", "defaults", "hydra", "1", "'a.b'", "<<"])
    for key in draw(st.lists(keys, max_size=4, unique_by=lambda key: key.split(".")[0])):
        *sections, name = key.split(".")
        lines += [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
        value = draw(st.sampled_from(fitting(key) if not draw(rare) else SCALARS))
        lines += [f"{'  ' * len(sections)}{name}: {value}"]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@cache
def of_a_run() -> bytes:
    save_config(load_config("tree"), Path("config.yaml"))
    return Path("config.yaml").read_bytes()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A run's own file: cut off, with other bits, or with another value."""
    whole = of_a_run()
    at, bit = draw(st.integers(0, len(whole) - 1)), draw(st.integers(0, 7))
    lines = whole.decode().splitlines()
    line = draw(st.integers(0, len(lines) - 1))
    lines[line] = lines[line].split(":")[0] + f": {draw(st.sampled_from(SCALARS))}"
    flipped = bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]])
    gone = whole[:at] + whole[at + draw(st.integers(1, 200)) :]
    return draw(
        st.sampled_from([whole[:at], flipped, flipped, gone, "\n".join(lines).encode("utf-8", "surrogatepass")])
    )


LAUGHS = b"a: &a [1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 10)) for c in range(98, 108)
)
MERGES = b"a: &a {x: 1}\n" + LAUGHS[10:].replace(b"[", b"{<<: [").replace(b"]", b"]}")
FILES = {
    "nothing": b"",
    "a comment": b"# tree\n",
    "a number": b"1",
    "a list": b"- 1\n- 2",
    "not UTF-8": b"tree:\n  plan: \xff\xfe",
    "NULs": b"\0" * 100,
    "noise": bytes((i * 7919 + i * i) % 256 for i in range(400)),
    "brackets": b"[" * 600,
    "lists in lists": b"tree: " + b"[" * 500 + b"]" * 500,
    "a million letters": b"x" * 10**6,
    "a key twice": b"seed: 1\nseed: 2",
    "a thousand laughs": LAUGHS,
    "laughs that merge": MERGES,
    "a list that holds itself": b"a: &a [*a]",
    "a mapping that is its own value": b"&a {b: *a}",
    "itself in its defaults": b"defaults:\n  - mine\n  - _self_\n",
    "two documents": b"seed: 1\n---\nseed: 2",
    "an object": b"seed: !!python/object/apply:os.system [touch pwned]",
    "a file that is an object": b"!!python/object/new:os.system [touch pwned]",
    "a date that is none": b"seed: !!timestamp x",
    "a number of 6000 hexadecimal digits": b"seed: 0x" + b"f" * 6000,
    "a group without a name": b"defaults:\n  - /: x\n",
    "a file elsewhere": b"defaults:\n  - ../../../../../../etc/passwd\n",
    "a place to search": b"hydra:\n  searchpath: [file:///etc]\n",
    "a section of another kind": b"tree: ${sample}\nrewards: {x: '${tree}'}",
}


class TestFiles:
    @settings(max_examples=20 * MORE)
    @given(content=st.one_of(*[documents()] * 9, st.binary(max_size=60)))
    def test_a_preset_of_ones_own_is_a_plan_or_one_line(self, content: bytes):
        Path("mine.yaml").write_bytes(content)
        outcome(lambda: load_config("mine.yaml"))

    @settings(max_examples=60 * MORE)
    @given(content=damaged())
    def test_a_damaged_run_is_a_plan_or_one_line(self, content: bytes):
        Path("config.yaml").write_bytes(content)
        outcome(lambda: read_config(Path("config.yaml")))

    @pytest.mark.parametrize("name", FILES)
    def test_a_file_that_is_no_configuration_is_one_line(self, name: str):
        Path("mine.yaml").write_bytes(FILES[name])
        assert outcome(lambda: load_config("mine.yaml"))
        assert outcome(lambda: read_config(Path("mine.yaml")))
        assert not Path("pwned").exists()

    def test_a_file_that_is_not_there(self):
        assert "there is no such file" in outcome(lambda: load_config("nowhere.yaml"))
        assert "No such file" in outcome(lambda: read_config(Path("nowhere.yaml")))

    def test_only_the_file_that_was_named_is_read(self):
        """Hydra would take own.yaml for own.yml."""
        for name in ("own.yml", "own.yaml"):
            Path(name).write_text("defaults:\n  - tree\n  - _self_\n")
        assert "own.yaml" in outcome(lambda: load_config("own.yml"))
        assert outcome(lambda: load_config("own")) == ""

    def test_python_is_never_run(self):
        tag = f"!!python/object/apply:os.system [touch {Path('pwned').resolve()}]"
        Path("config.yaml").write_text(of_a_run().decode().replace("run_name: auto", f"run_name: {tag}"))
        Path("mine.yaml").write_text(f"defaults:\n  - tree\n  - _self_\nrun_name: {tag}\n")
        assert "python/object" in outcome(lambda: read_config(Path("config.yaml")))
        assert "python/object" in outcome(lambda: load_config("mine.yaml"))
        assert "python/object" in outcome(lambda: load_config("tree", [f"run_name={tag}"]))
        assert "python/object" in outcome(lambda: load_config("tree", [f"run_name='{tag}'"]))
        assert not Path("pwned").exists()


NAMES = [
    "..",
    ".",
    "",
    "a/b",
    "../x",
    "/abs",
    "C:\\x",
    "a\0",
    "a\n",
    "\n",
    "a\\..\\b",
    "．．",
    "a∕b",
    "~",
    "-x",
    ".x",
    "a" * 101,
]


def new_run(config: Config) -> Config:
    """A run that begins with the settings of another."""
    check_folder(config, None)
    return config


class TestNamesOfRuns:
    """Folders right inside the folder of runs, or refused."""

    def check(self, make: Callable[[], Config]) -> bool:
        try:
            config = make()
        except InputError:
            return False
        folder = Path(config.log.dir)
        assert (folder / config.run_name).resolve().parent == folder.resolve()
        assert len(config.run_name) <= 100
        return True

    @pytest.mark.parametrize("name", NAMES)
    def test_what_is_no_plain_name_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch):
        Path("config.yaml").write_text(yaml.safe_dump({"run_name": name}))
        assert not self.check(lambda: new_run(read_config(Path("config.yaml"))))
        assert not self.check(lambda: load_config("tree", [f"run_name='{name}'"]))
        if "\0" not in name:
            monkeypatch.setenv("SLURM_JOB_NAME", name)
            assert not self.check(lambda: load_config("tree", ["run_name=${oc.env:SLURM_JOB_NAME}"]))

    @settings(max_examples=60 * MORE)
    @given(name=st.one_of(st.text(), st.text("ab./\\~-_ \n\0:", max_size=6), st.from_regex(r"[\w.-]{1,110}")))
    def test_any_text_in_a_file(self, name: str):
        Path("config.yaml").write_text(yaml.safe_dump({"run_name": name, "log": {"dir": "deep/runs"}}))
        made = self.check(lambda: new_run(read_config(Path("config.yaml"))))
        assert made == bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name))

    @settings(max_examples=30 * MORE)
    @given(name=st.one_of(st.text(), st.text("ab./\\~-_ \n\0:$'{}", max_size=6), st.from_regex(r"[\w.-]{1,110}")))
    def test_any_text_in_an_override(self, name: str):
        self.check(lambda: load_config("tree", [f"run_name={name}"]))


COMMANDS = {
    "steps without end": ["plan", "sample.num_steps=1000000000000"],
    "one step": ["plan", "sample.num_steps=1"],
    "prompts without end": ["plan", "--json", "sample.num_prompts=1000000000000000"],
    "an object in an override": ["plan", f"run_name='{PYTHON}'"],
    "an object in a file": ["plan", "-c", "object.yaml"],
    "laughs": ["plan", "-c", "laughs.yaml"],
    "not UTF-8": ["plan", "-c", "bytes.yaml"],
    "a file without its own place in its defaults": ["plan", "-c", "wrong.yaml"],
    "a name that leaves the folder": ["train", "-c", "mixture", "run_name=../../x"],
    "control characters": ["plan", "tree.w=\x1b[31m\r\nerror: another"],
    "a very long key": ["plan", "a" * 10**5 + "=1"],
    "a folder's name that is too long": ["train", "-c", "mixture", "log.dir=" + "a" * 300],
    "a run that is damaged": ["eval", "--run", "run"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_says_one_line(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "object.yaml").write_text(f"defaults:\n  - tree\nrun_name: {PYTHON}\n")
    (here / "laughs.yaml").write_bytes(LAUGHS)
    (here / "bytes.yaml").write_bytes(b"run_name: \xff")
    (here / "wrong.yaml").write_text("defaults:\n  - tree\ntree:\n  w: x\n")
    (here / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    (here / "run" / "config.yaml").write_text("tree: [")
    before = sorted(here.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(COMMANDS[name])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert "Traceback" not in said.out + said.err
    assert sorted(here.rglob("*")) == before
