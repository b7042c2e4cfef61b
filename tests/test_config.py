"""Settings: precedence, types, unknown keys."""

from pathlib import Path

import pytest

from dlrover import config
from dlrover.errors import ConfigurationError
from dlrover.spec.job import Limits


def test_defaults():
    assert config.settings({}) == config.Settings()


def test_flag_beats_environment_beats_file(tmp_path: Path):
    file = tmp_path / "dlrover.toml"
    file.write_text("join_timeout = 1.5\nlast_call_timeout = 2\nheartbeat_interval = 3\n")
    env = {"DLROVER_LAST_CALL_TIMEOUT": "20", "DLROVER_HEARTBEAT_INTERVAL": "30"}
    found = config.settings(env, str(file), {"heartbeat_interval": "300"}).limits
    assert (found.join_timeout, found.last_call_timeout, found.heartbeat_interval) == (1.5, 20, 300)
    assert found.join_timeout != Limits().join_timeout


def test_the_environment_names_the_file(tmp_path: Path):
    file = tmp_path / "dlrover.toml"
    file.write_text('tls_ca = "ca.pem"\n')
    assert config.settings({"DLROVER_CONFIG": str(file)}).tls_ca == "ca.pem"


def test_other_variables_are_not_settings():
    env = {"DLROVER_MASTER_ADDR": "host:1", "DLROVER_TOKEN": "x", "DLROVER_JOB_DIR": "/x"}
    assert config.settings(env) == config.Settings()


def test_torchruns_keys_are_accepted_and_the_originals_spelling_too():
    conf = {"is_host": "1", "read_timeout": "60", "lastcall_timeout": "7"}
    assert config.settings({}, rdzv_conf=conf).limits.last_call_timeout == 7


@pytest.mark.parametrize(
    ("env", "file", "conf", "message"),
    [
        ({}, "joint_timeout = 1\n", {}, "joint_timeout, which is not a setting"),
        ({}, "join_timeout = [\n", {}, "not valid TOML"),
        ({}, 'join_timeout = "soon"\n', {}, "wrong value"),
        ({"DLROVER_JOIN_TIMEOUT": "soon"}, "", {}, "wrong value"),
        ({}, "", {"join": "1"}, "--rdzv-conf sets join, which is not a setting"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path: Path, env, file, conf, message: str):
    path = tmp_path / "dlrover.toml"
    path.write_text(file)
    with pytest.raises(ConfigurationError, match=message) as caught:
        config.settings(env, str(path), conf)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"absent\.toml cannot be read"):
        config.settings({}, str(tmp_path / "absent.toml"))


def test_state_dir():
    assert config.state_dir({"HOME": "/home/u"}) == Path("/home/u/.local/state/dlrover")
    assert config.state_dir({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/dlrover")
    assert config.state_dir({"DLROVER_STATE_DIR": "/d", "XDG_STATE_HOME": "/s"}) == Path("/d")


def test_the_port_for_metrics_is_a_number_from_any_place(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('metrics_port = 1\nmetrics_host = "0.0.0.0"\n')
    found = config.settings({}, str(file))
    assert (found.metrics_port, found.metrics_host) == (1, "0.0.0.0")
    env = {"DLROVER_METRICS_PORT": "2"}
    assert config.settings(env, str(file)).metrics_port == 2
    assert config.settings(env, str(file), {"metrics_port": "3"}).metrics_port == 3
    assert config.settings({}).metrics_port == 0


@pytest.mark.parametrize("value", ["nine", "-1", "65536"])
def test_a_wrong_port_for_metrics_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"A setting has a wrong value: .*metrics_port"):
        config.settings({}, rdzv_conf={"metrics_port": value})


def test_budgets_for_causes_are_a_table_in_the_file_and_words_elsewhere(tmp_path: Path):
    file = tmp_path / "dlrover.toml"
    file.write_text('diagnosis_rules = "rules.toml"\n[cause_budgets]\necc = 2\nhost_oom = 5\n')
    expected = {"ecc": 2, "host_oom": 5}
    found = config.settings({}, str(file))
    assert (found.limits.cause_budgets, found.diagnosis_rules) == (expected, "rules.toml")
    env = {"DLROVER_CAUSE_BUDGETS": "ecc:2 host_oom:5"}
    assert config.settings(env).limits.cause_budgets == expected
    conf = {"cause_budgets": "ecc:2 host_oom:5"}
    assert config.settings({}, rdzv_conf=conf).limits.cause_budgets == expected


@pytest.mark.parametrize("text", ["ecc", "ecc:", ":2", "ecc:two", "ecc:-1"])
def test_a_budget_that_is_none_is_named(text):
    with pytest.raises(
        ConfigurationError, match=r"cause_budgets .* is not of the form CAUSE:NUMBER"
    ):
        config.settings({"DLROVER_CAUSE_BUDGETS": f"host_oom:1 {text}"})
