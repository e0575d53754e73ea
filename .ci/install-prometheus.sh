#!/bin/sh
# Unpacks Debian's Prometheus (prometheus and promtool) into a folder: .ci/install-prometheus.sh DIR
# Then: export WARMROUTE_PROMETHEUS_DIR=DIR. Installs nothing, starts no service, and needs no root: where the
# system's package lists are missing or old, it fetches its own.
set -eu
DIR=${1:?usage: install-prometheus.sh DIR}
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)
if [ ! -x "$DIR/promtool" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    cd "$WORK"
    if ! apt-get download -qq prometheus 2>/dev/null; then
        mkdir -p state/lists/partial cache/archives/partial
        set -- -o Dir::State="$WORK/state" -o Dir::State::status=/var/lib/dpkg/status \
            -o Dir::Cache="$WORK/cache" -o APT::Sandbox::User=
        apt-get "$@" -qq update
        apt-get "$@" -qq download prometheus
    fi
    dpkg-deb -x prometheus_*.deb unpacked
    for NAME in prometheus promtool; do
        cp "unpacked/usr/bin/$NAME" "$DIR/$NAME.part"
        mv "$DIR/$NAME.part" "$DIR/$NAME"
    done
fi
"$DIR/prometheus" --version 2>&1 | head -n 1
