"""``dlrover strategy``: table, JSON and page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from dlrover.cli.main import app
from dlrover.cli.strategy_page import pareto
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Cluster, Transformer
from dlrover.planning.parallel.search import search

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["strategy", *map(str, arguments)])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_table_has_a_bar_of_memory_for_each_strategy(config):
    done = run(config, "--accelerator", "h100-80", "--sequence", 8192, "--limit", 4)
    assert done.exit_code == 0, done.output
    assert "8.0 B parameters on 8 x h100-80, 512 sequences of 8192 tokens a step" in done.output
    assert len(re.findall("#{5,20}", done.output)) == 4
    assert "4 of " in done.output


def test_json_has_strategies_and_predictions(config):
    done = run(config.parent, "--accelerator", "a100-80", "--nodes", 2, "--output", "json")
    found = json.loads(done.output)
    assert found["cluster"] == {"accelerator": "a100-80", "accelerators": 16}
    first = found["strategies"][0]
    assert first["prediction"]["fits"]
    model = Transformer.of(CONFIG)
    best = search(model, Cluster("a100-80", 2), sequence=4096, global_batch=found["global_batch"])
    assert first["strategy"]["tp"] == best[0][0].tp
    assert first["prediction"]["step_seconds"] == pytest.approx(best[0][1].step_seconds)


def test_the_page_is_well_formed_and_shows_each_strategy(config, tmp_path):
    page = tmp_path / "page.html"
    done = run(config, "--accelerator", "h100-80", "--html", page)
    assert done.exit_code == 0
    text = page.read_text()
    found = search(Transformer.of(CONFIG), Cluster(), sequence=4096, global_batch=1024, limit=10**6)
    assert text.count("<circle") == len(found)
    assert text.count('class="best"') == len(pareto(found))
    assert "http" not in text
    HTMLParser().feed(text)


def test_no_strategy_beats_one_of_the_line():
    found = search(Transformer.of(CONFIG), Cluster(), sequence=4096, global_batch=64, limit=10**6)
    line = pareto(found)
    for at in line:
        mine = found[at][1]
        assert not any(
            p.memory_gib < mine.memory_gib and p.step_seconds < mine.step_seconds for _, p in found
        )


def test_a_function_may_return_a_shape_or_an_object_with_a_configuration(tmp_path, monkeypatch):
    (tmp_path / "shapes_of_ours.py").write_text(
        "from types import SimpleNamespace\n"
        f"def wide(): return SimpleNamespace(config={CONFIG!r})\n"
        "def flat(): return wide().config\n"
    )
    monkeypatch.chdir(tmp_path)
    outputs = {
        run(f"shapes_of_ours:{name}", "--accelerator", "h100-80").output
        for name in ("wide", "flat")
    }
    assert len(outputs) == 1
    assert "8.0 B parameters" in outputs.pop()


def test_nothing_fits(config):
    done = run(config, "--accelerator", "a100-40", "--per-node", 1, "--sequence", 131072)
    assert done.exit_code == 3
    assert "No strategy fits" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing.json",), "nothing.json cannot be read: No such file"),
        (("no_module_of_ours:shape",), "MODEL is no_module_of_ours:shape: No module"),
        (("json:shape",), "MODEL is json:shape: module 'json' has no attribute 'shape'"),
        (("json:__name__",), "MODEL is json:__name__, which is a str; accepted is a function"),
        (
            (":shape",),
            "MODEL is :shape; accepted are a config.json, its directory, and MODULE:FUNCTION.",
        ),
        (("..ours:shape",), "MODEL is ..ours:shape; accepted are a config.json"),
    ],
)
def test_a_wrong_model_is_named(arguments, sentence):
    done = run(*arguments, "--accelerator", "h100-80")
    assert isinstance(done.exception, ConfigurationError)
    assert sentence in str(done.exception)


def test_a_wrong_file_or_accelerator_is_named(config):
    config.write_text("{")
    assert "is not valid JSON" in str(run(config, "--accelerator", "h100-80").exception)
    config.write_text("[" * 100_000)
    assert "is not valid JSON" in str(run(config, "--accelerator", "h100-80").exception)
    config.write_text(json.dumps(CONFIG))
    assert "accepted are a100-40" in str(run(config, "--accelerator", "h1").exception)


def test_fp8_needs_an_accelerator_that_has_it(config):
    done = run(config, "--accelerator", "a100-80", "--precision", "fp8")
    assert "--precision is fp8: a100-80 has no products in fp8." in str(done.exception)
    done = run(config, "--accelerator", "h100-80", "--precision", "int4")
    assert done.exit_code == 2
    assert "'int4'" in done.output


def test_an_error_within_the_function_is_the_users(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("def shape():\n    return {}.layers\n")
    monkeypatch.chdir(tmp_path)
    done = run("broken_model:shape", "--accelerator", "h100-80")
    assert isinstance(done.exception, AttributeError)
