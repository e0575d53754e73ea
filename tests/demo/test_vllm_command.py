import json

from extproc.demo import vllm_command


def option(command, name):
    return command[command.index(name) + 1]


def test_the_command_serves_the_tiny_model_with_what_predictions_need(tmp_path):
    command, environment = vllm_command.build("/opt/vllm/bin/python", tmp_path / "engine", 450)
    assert command[0] == "/opt/vllm/bin/python"
    assert "--enable-prompt-tokens-details" in command
    assert option(command, "--num-gpu-blocks-override") == "450"
    assert int(option(command, "--block-size")) == vllm_command.CPU_BLOCK_SIZE
    events = json.loads(option(command, "--kv-events-config"))
    assert (events["enable_kv_cache_events"], events["publisher"]) == (True, "zmq")
    assert option(command, "--host") == environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert (tmp_path / "engine").is_dir()
    assert environment["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    assert "PATH" in environment


def test_where_it_can_be_reached(tmp_path):
    command, _ = vllm_command.build("python", tmp_path, 1)
    endpoint, events, replay = vllm_command.endpoints(command)
    assert endpoint == f"127.0.0.1:{option(command, '--port')}"
    assert events.startswith("tcp://127.0.0.1:")
    assert len({endpoint, events, replay}) == 3


def test_two_engines_do_not_share_ports(tmp_path):
    reached = [vllm_command.endpoints(vllm_command.build("python", tmp_path, 1)[0]) for _ in range(2)]
    ports = {address.rpartition(":")[2] for addresses in reached for address in addresses}
    assert len(ports) == 6
