"""Settings: precedence, types, unknown keys."""

import os
import tempfile
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
    found = config.settings(env, str(file), {"heartbeat_interval": "25"}).limits
    assert (found.join_timeout, found.last_call_timeout, found.heartbeat_interval) == (1.5, 20, 25)
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
        (
            {},
            "joint_timeout = 1\n",
            {},
            r"not a setting\. Did you mean join_timeout\?$",
        ),
        ({}, "colour = 1\n", {}, "colour, which is not a setting. The settings are"),
        ({}, "join_timeout = [\n", {}, "not valid TOML"),
        ({}, "join_timeout = 1  # caf\xe9\n", {}, "not valid TOML: 'utf-8' codec"),
        ({}, 'join_timeout = "soon"\n', {}, "wrong value"),
        ({"DLROVER_JOIN_TIMEOUT": "soon"}, "", {}, "wrong value"),
        ({}, "", {"join": "1"}, "--rdzv-conf sets join, which is not a setting"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path: Path, env, file, conf, message: str):
    path = tmp_path / "dlrover.toml"
    path.write_text(file, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=message) as caught:
        config.settings(env, str(path), conf)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"absent\.toml cannot be read"):
        config.settings({}, str(tmp_path / "absent.toml"))


def test_state_dirs():
    temporary = Path(tempfile.gettempdir(), f"dlrover-{os.getuid()}")
    assert config.state_dirs({"HOME": "/home/u"}) == [
        Path("/home/u/.local/state/dlrover"),
        temporary,
    ]
    assert config.state_dirs({}) == [temporary]
    assert config.state_dirs({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == [
        Path("/s/dlrover"),
        temporary,
    ]
    assert config.state_dirs({"DLROVER_STATE_DIR": "/d", "XDG_STATE_HOME": "/s"}) == [Path("/d")]


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
    said = f"--rdzv-conf metrics_port={value}: the setting has a wrong value; it takes a whole number from 0"
    with pytest.raises(ConfigurationError, match=said):
        config.settings({}, rdzv_conf={"metrics_port": value})


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("DLROVER_HEARTBEAT_TIMEOUT", "abc", "a number"),
        ("DLROVER_NO_PROGRESS_RESTARTS", "2.5", "a whole number"),
        ("DLROVER_HANG_DETECTION", "maybe", "true or false"),
        ("DLROVER_HANG_ACTION", "reboot", "restart or report"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(variable: str, value: str, accepted: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config.settings({variable: value})
    assert str(caught.value) == (
        f"{variable}={value}: the setting has a wrong value; it takes {accepted}."
    )


def test_a_wrong_value_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dlrover.toml"
    file.write_text('heartbeat_timeout = "abc"\n')
    with pytest.raises(
        ConfigurationError, match=f"{file}: heartbeat_timeout = abc: the setting has"
    ):
        config.settings({}, str(file))


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


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("DLROVER_HEARBEAT_TIMEOUT", "DLROVER_HEARTBEAT_TIMEOUT"),
        ("DLROVER_TOKN", "DLROVER_TOKEN"),
        ("DLROVER_JOBDIR", "DLROVER_JOB_DIR"),
        ("DLROVER_join_timeout", "DLROVER_JOIN_TIMEOUT"),
        ("DLROVER_BRAIN_PORT", "DLROVER_BRAIN_TOKEN"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_one(given: str, nearest: str) -> None:
    message = rf"{given} is set and is no variable of DLRover\. Did you mean {nearest}\?$"
    with pytest.raises(ConfigurationError, match=message):
        config.settings({given: "1"})


def test_variables_that_others_set_are_no_misspelt_ones() -> None:
    services = {
        "DLROVER_BRAIN_SERVICE_HOST": "10.0.0.1",
        "DLROVER_BRAIN_SERVICE_PORT": "80",
        "DLROVER_BRAIN_SERVICE_PORT_GRPC": "80",
        "DLROVER_BRAIN_PORT": "tcp://10.0.0.1:80",
        "DLROVER_BRAIN_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    for name in ("DLROVER", "DLROVER_METRICS"):
        services |= {
            f"{name}_SERVICE_HOST": "10.0.0.1",
            f"{name}_SERVICE_PORT_HTTP": "80",
            f"{name}_PORT": "tcp://10.0.0.1:80",
            f"{name}_PORT_80_TCP": "tcp://10.0.0.1:80",
        }
    tests = {"DLROVER_TEST_SERVICES": "helm", "DLROVER_PROBE_FAULTS": "0:disk:failed"}
    others = {f"DLROVER_{name}": "x" for name in config.OTHER_VARIABLES - {"CONFIG"}}
    assert config.settings(services | tests | others) == config.Settings()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            {"heartbeat_timeout": "8"},
            "The setting heartbeat_timeout is 8 and heartbeat_interval is 15: heartbeat_timeout must be 30 or "
            "more, since one late heartbeat must not lose a node.",
        ),
        ({"slow_rank_window": "10"}, "slow_rank_window must be 15 or more"),
        ({"usage_interval": "3600"}, "memory_horizon must be 3600 or more"),
        ({"autoscale_window": "1000"}, "autoscale_patience must be 1000 or more"),
        ({"join_timeout": "nan"}, "The setting join_timeout is nan; it must be a finite number."),
        ({"join_timeout": "inf"}, "The setting join_timeout is inf; it must be a finite number."),
        ({"node_fault_limit": "-1"}, "The setting node_fault_limit is -1; it must be 0 or more."),
        ({"heartbeat_interval": "0"}, "The setting heartbeat_interval is 0; it must be above 0."),
        ({"autoscale_cost": "2"}, "The setting autoscale_cost is 2; it must be between 0 and 1."),
        ({"hang_factor": "0.5"}, "The setting hang_factor is 0.5; it must be 1 or more."),
    ],
)
def test_limits_are_checked_as_a_whole(conf: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config.settings({}, rdzv_conf=conf)


def test_each_limit_that_is_checked_exists() -> None:
    named = {*config.ABOVE_ZERO, *config.RANGES}
    named |= {name for first, _, second, _ in config.RELATIONS for name in (first, second)}
    assert named <= set(Limits.__struct_fields__)


def test_a_variable_that_is_like_no_other_is_named_alone() -> None:
    for name in ("DLROVER_", "DLROVER_XYZZY"):
        with pytest.raises(
            ConfigurationError, match=f"^{name} is set and is no variable of DLRover.$"
        ):
            config.settings({name: "1"})


def test_an_empty_variable_is_not_set() -> None:
    assert config.settings({"DLROVER_JOIN_TIMEOUT": "", "DLROVER_XYZZY": ""}) == config.Settings()


def test_the_window_of_slow_ranks_fits_the_heartbeats_unless_it_is_set() -> None:
    conf = {"heartbeat_interval": "60", "heartbeat_timeout": "200"}
    assert config.settings({}, rdzv_conf=conf).limits.slow_rank_window == 60
    with pytest.raises(ConfigurationError, match="slow_rank_window must be 60"):
        config.settings({}, rdzv_conf=conf | {"slow_rank_window": "30"})
