#!/bin/sh
# Installs what the project's tasks need and what is not there yet (Debian, Ubuntu); elsewhere, or
# without the rights, says what is missing and how to get it.
#
#   setup.sh compiler    what cargo needs to link: this is why setup is no task of xtask
#   setup.sh fuzz        that, and what the fuzz engine needs
#   setup.sh python      that, and what the Python package and its tests need
#   setup.sh             what cargo needs, and what the lab's VMs and the recorder of programs need
set -u

packages=
need() { packages="$packages $1"; }

command -v cc >/dev/null || need gcc
[ -e /usr/include/stdio.h ] || need libc6-dev
[ "${1-}" != fuzz ] || command -v c++ >/dev/null || need g++
[ "${1-}" != python ] || python3 -c 'import ensurepip' 2>/dev/null || need python3-venv
if [ -z "${1-}" ]; then
    command -v qemu-system-x86_64 >/dev/null || need qemu-system-x86
    command -v qemu-x86_64 >/dev/null || need qemu-user
    command -v dpkg-deb >/dev/null || need dpkg
    command -v xz >/dev/null || need xz-utils
    # The balloon driver is built for the VMs' kernel, with programs of the kernel's headers.
    command -v make >/dev/null || need "make libelf1"
fi
packages=${packages# }

give_up() {
    echo "error: missing: $packages: $1; get them with: $2" >&2
    exit 1
}

if [ -n "$packages" ]; then
    if ! command -v apt-get >/dev/null; then
        give_up "there is no apt-get here to install them" \
            "your package manager (the names are Debian's)"
    fi
    if [ "$(id -u)" != 0 ]; then
        give_up "only root can install them" "sudo apt-get install $packages"
    fi
    echo "setup: installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    install() {
        # Unquoted: one argument for each package.
        apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 install $packages 2>&1
    }
    # Package lists are often old or absent on a fresh machine: then once more with new ones.
    if ! said=$(install || { apt-get -qq update 2>&1 && install; }); then
        [ -z "$said" ] || printf '%s\n' "$said" >&2
        give_up "apt-get cannot install them (is there a network?)" "apt-get install $packages"
    fi
fi

# The lab downloads a stock kernel by the package lists; a kernel of an earlier run serves, too.
if [ -z "${1-}" ] && command -v apt-cache >/dev/null && [ "$(id -u)" = 0 ] &&
    [ -z "$(apt-cache search --names-only '^linux-image-.*-cloud-amd64$')" ]; then
    apt-get -qq update ||
        echo "setup: no package lists and no network: the lab needs a kernel that it has cached" >&2
fi
exit 0
