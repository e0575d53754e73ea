import pytest

from extproc.config import Admin, ConfigError, Journal, load, parse

VARIABLE = "WARMROUTE_TOKEN"
POOLS = "pools:\n  - discovery: {static: [127.0.0.1:8000]}\n"


def test_by_default_only_this_machine_sees_the_admin_server_and_nothing_is_recorded():
    config = parse(POOLS)
    assert config.admin == Admin(listen="127.0.0.1:9902")
    assert config.admin.token() is None
    assert config.journal == Journal()
    assert config.journal.path is None


def test_paths_are_relative_to_the_file(tmp_path):
    file = tmp_path / "warmroute.yaml"
    file.write_text(POOLS + "admin: {token_file: token}\njournal: {path: var/journal}\n")
    config = load(file)
    assert config.admin.token_file == tmp_path / "token"
    assert config.journal.path == tmp_path / "var" / "journal"


def test_the_token_is_read_without_its_line_end(tmp_path):
    (tmp_path / "token").write_text("  long random text\n")
    assert Admin(token_file=tmp_path / "token").token() == "long random text"


def test_the_token_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, " long random text ")
    assert Admin(token_env=VARIABLE).token() == "long random text"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=r"admin\.token_env: .*WARMROUTE_TOKEN is not set"):
        Admin(token_env=VARIABLE).token()
    with pytest.raises(ConfigError, match="name one of"):
        parse(POOLS + "admin: {token_file: a, token_env: B}\n")


@pytest.mark.parametrize("content", [None, "", " \n", b"\xff\xfe"])
def test_a_token_file_without_a_token_is_an_error_not_an_open_door(tmp_path, content):
    file = tmp_path / "token"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"admin\.token_file.*token"):
        Admin(token_file=file).token()


@pytest.mark.parametrize(
    "text",
    [
        "journal: {max_mb: 0}",
        "journal: {keep: 0}",
        "decision_log: {sample: 1.5}",
        "decision_log: {redact: [selected_worker]}",
        "decision_log: {max_mb: -1}",
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match=r"line 3: (journal|decision_log)\."):
        parse(POOLS + text)


def test_the_decision_log_has_its_writers_settings():
    log = parse(POOLS + "decision_log: {sample: 0.1, redact: [request_id], max_mb: 2, keep: 7}").decision_log
    settings = log.settings()
    assert (settings.sample, settings.redact) == (0.1, frozenset({"request_id"}))
    assert (settings.max_bytes, settings.keep) == (2_000_000, 7)
