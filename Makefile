# Thin: the tasks are in xtask/, what must be there before them is in xtask/setup.sh.

PATH := $(PATH):$(HOME)/.cargo/bin
export PATH
ifeq ($(shell PATH="$(PATH)" command -v cargo 2>/dev/null),)
$(error Rust is missing; get it from https://rustup.rs and try again)
endif

.PHONY: build setup demo test test-long bench fuzz future

# Static release binaries: target/release/demeter and the workload programs.
build:
	@sh xtask/setup.sh compiler
	@cargo xtask build

# Installs the packages that the other targets need.
setup:
	@sh xtask/setup.sh

# Four systems in real VMs, a table and a page, in a few minutes.
demo: setup
	@cargo xtask demo

# Everything that must hold before a change is merged.
test: setup
	@sh xtask/setup.sh fuzz
	@sh xtask/setup.sh python || echo 'the Python package will not be tested'
	@cargo xtask test

# What takes hours: all sizes on the simulator, a hundred random cases, an hour of resizing VMs.
test-long: setup
	@cargo xtask test-long

# A million inputs for each fuzz target: about an hour.
fuzz:
	@sh xtask/setup.sh fuzz
	@cargo xtask fuzz

# How fast an epoch and the simulator are, the latter beside plain C.
bench:
	@sh xtask/setup.sh compiler
	@cargo xtask bench

# The newest kernel and the newest Debian that the archive has; names what broke. For each week.
future: setup
	@cargo xtask future
