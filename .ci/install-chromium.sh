#!/bin/sh
# Installs Chromium and its driver from Debian for the tests of the status page: .ci/install-chromium.sh
# Needs root, and nothing is done where both are there already.
set -eu
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null
chromium --version
