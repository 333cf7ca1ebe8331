#!/usr/bin/env bash
# The Debian packages that the Slurm tests need, if they are missing and can be had; if not, says so and succeeds.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

missing() {
    local program
    for program in slurmctld slurmd sbatch munged ip nsenter unshare setpriv; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

cannot() {
    printf '\n*** THE SLURM TESTS CANNOT RUN: %s.\n*** They will be skipped.\n\n' "$*" >&2
    exit 0
}

if [ "$(missing)" ]; then
    wanted=$(missing | tr '\n' ' ')
    [ "$(id -u)" = 0 ] || cannot "missing ${wanted}and only root can install packages"
    command -v apt-get >/dev/null || cannot "missing ${wanted}and there is no apt-get"
    echo "installing Slurm, for its tests ..."
    # With a run level of 1, Debian starts none of the services that it installs.
    { apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        munge slurmctld slurmd slurm-client iproute2 util-linux mount; } >/dev/null ||
        cannot "apt-get could not install Slurm"
    [ -z "$(missing)" ] || cannot "missing $(missing | tr '\n' ' ')though its packages are installed"
fi
[ "$(id -u)" = 0 ] || cannot "they need root"
