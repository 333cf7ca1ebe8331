#!/usr/bin/env bash
# Chromium and its driver for the tests of the page, if they are missing and can be had; if not, says so and succeeds.
set -euo pipefail

missing() {
    local program
    for program in chromium chromedriver; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

cannot() {
    printf '\n*** THE TESTS IN A BROWSER CANNOT RUN: %s.\n*** They will be skipped.\n\n' "$*" >&2
    exit 0
}

[ "$(missing)" ] || exit 0
wanted=$(missing | tr '\n' ' ')
[ "$(id -u)" = 0 ] || cannot "missing ${wanted}and only root can install packages"
command -v apt-get >/dev/null || cannot "missing ${wanted}and there is no apt-get"
echo "installing Chromium, for the tests of the page ..."
{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
    chromium chromium-driver; } >/dev/null || cannot "apt-get could not install Chromium"
