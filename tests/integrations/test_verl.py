"""Decisions about verl's worker groups, without verl; tests/ray/test_verl.py has the groups themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from dlrover.errors import ConfigurationError
from dlrover.integrations.verl import Repair
from dlrover.integrations.verl.history import CallHistory, CallKind, repair
from dlrover.integrations.verl.launch import HOOK, job_config
from dlrover.roles.spec import Failover


def called(history: CallHistory, *methods: str) -> CallHistory:
    for number, method in enumerate(methods):
        history.begins(method)
        history.done(method, f"{method} {number}")
    return history


def test_settings_are_fields_and_kinds_of_methods() -> None:
    read = repair("failover=job, max_restarts=3,window=60,wait=5, score=pure,load=weights")
    assert (read.failover, read.max_restarts, read.window, read.wait) == (Failover.JOB, 3, 60, 5)
    assert read.calls == {"score": CallKind.PURE, "load": CallKind.WEIGHTS}
    assert repair("") == Repair()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("score", "setup, weights, pure, state"),
        ("score=often", "setup, weights, pure, state"),
        ("failover=never", "instance|role|job"),
        ("max_restarts=many", "max_restarts=N"),
        ("max_restarts=-1", "max_restarts must be 0 or more"),
        ("wait=0", "wait above 0"),
        ("window=nan", "finite"),
        ("wait=nan", "finite"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match="DLROVER_VERL=") as caught:
        repair(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_new_actors_get_the_set_up_and_the_last_weights_in_their_order() -> None:
    history = CallHistory(Repair(calls={"load": CallKind.WEIGHTS}))
    called(history, "init_model", "load", "compute_log_prob", "load", "set_loss_fn")
    assert not history.refusal(0)
    assert [call for *_, call in history.repeated] == ["init_model 0", "load 3", "set_loss_fn 4"]


def test_workers_that_share_processes_have_weights_of_their_own() -> None:
    history = CallHistory(Repair(calls={"load": CallKind.WEIGHTS}), prefixes=["actor", "ref"])
    called(history, "actor_load", "ref_load", "actor_load")
    assert [call for *_, call in history.repeated] == ["ref_load 1", "actor_load 2"]
    history = CallHistory(Repair(calls={"load": CallKind.WEIGHTS}), prefixes=["actor", "ref"])
    for number, worker in enumerate(("actor", "ref", "actor")):  # fused: the name has no prefix
        history.done("load", number, worker)
    assert [call for *_, call in history.repeated] == [1, 2]


def test_methods_of_colocated_workers_have_the_prefix_of_theirs() -> None:
    history = CallHistory(Repair(), prefixes=["actor_rollout", "ref"])
    assert history.kind("actor_rollout_init_model") is CallKind.SETUP
    assert history.kind("ref_compute_ref_log_prob") is CallKind.PURE
    assert history.kind("other_init_model") is CallKind.STATE


@pytest.mark.parametrize("method", ["update_actor", "load_checkpoint", "update_weights", "of_mine"])
def test_a_group_that_was_changed_is_not_made_anew_and_the_first_change_is_named(method) -> None:
    history = called(CallHistory(Repair()), "init_model")
    history.begins(method)  # and dies in it
    called(history, "update_critic")
    assert f"has run {method}" in history.refusal(0)


def test_a_set_up_that_raised_is_not_repeated_half() -> None:
    history = CallHistory(Repair())
    history.begins("init_model")
    history.failed("init_model")
    assert "init_model has failed" in history.refusal(0)
    history = called(CallHistory(Repair()), "init_model")
    history.failed("compute_log_prob")
    assert not history.refusal(0)


def test_restarts_are_counted_within_the_window() -> None:
    history = CallHistory(Repair(max_restarts=2, window=10))
    assert [bool(history.refusal(now)) for now in (0, 1, 2, 9.5, 10.5, 10.6)] == [
        False, False, True, True, False, True,
    ]  # fmt: skip
    assert "failover=job" in CallHistory(Repair(failover=Failover.JOB)).refusal(0)


def test_the_hook_is_added_to_what_ray_job_submit_has_set() -> None:
    given = json.dumps({"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {"job": "x"}})
    job = job_config(given, "wait=5")
    assert job["runtime_env"]["worker_process_setup_hook"] == HOOK
    assert job["runtime_env"]["env_vars"] == {"A": "1", "DLROVER_VERL": "wait=5"}
    assert job["metadata"] == {"job": "x"}
    assert job_config(json.dumps(job), "wait=5") == job
    with pytest.raises(ConfigurationError, match="worker_process_setup_hook mine"):
        job_config(json.dumps({"runtime_env": {"worker_process_setup_hook": "mine"}}), "")


@pytest.mark.parametrize(
    "given", ["", "{}", '{"runtime_env": null}', '{"runtime_env": {"env_vars": null}}']
)
def test_a_job_without_a_runtime_environment_gets_one(given: str) -> None:
    env = {"worker_process_setup_hook": HOOK, "env_vars": {"DLROVER_VERL": "wait=5"}}
    assert job_config(given, "wait=5") == {"runtime_env": env}


MALFORMED = (
    "{",
    "[]",
    "null",
    '{"runtime_env": []}',
    '{"runtime_env": {"env_vars": ["A"]}}',
    '{"runtime_env": {"env_vars": {"A": 1}}}',
    '{"runtime_env": {"worker_process_setup_hook": 1}}',
)


@pytest.mark.parametrize("given", MALFORMED)
def test_a_malformed_configuration_of_the_ray_job_is_refused_in_one_sentence(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^RAY_JOB_CONFIG_JSON_ENV_VAR: ") as caught:
        job_config(given, "")
    assert str(caught.value).endswith("unset or correct it.")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"DLROVER_VERL": "score=often"}, "DLROVER_VERL=score=often"),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray cluster can be reached"),
        *(
            ({"RAY_JOB_CONFIG_JSON_ENV_VAR": text}, "RAY_JOB_CONFIG_JSON_ENV_VAR: ")
            for text in MALFORMED[:2]
        ),
        ({"HIDE": "verl"}, "needs the package verl: pip install verl"),
        ({"HIDE": "ray"}, "pip install 'dlrover[ray]>="),
    ],
)
def test_what_is_missing_or_wrong_is_said_before_the_program_starts(tmp_path, env, said) -> None:
    """The packages are empty ones, and a hidden one is not there."""
    if importlib.util.find_spec(env.get("HIDE", "no_such")):
        pytest.skip("the package is installed here")
    for name in {"ray", "verl"} - {env.get("HIDE")}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "program.py").write_text("raise SystemExit(9)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), **env}
    command = [sys.executable, "-m", "dlrover.integrations.verl", str(tmp_path / "program.py")]
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
