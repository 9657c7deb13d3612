# Godwit. Two commands matter: `make demo` shows it, `make test` checks it.
# Everything is built in one profile (release, with overflow checks): what is tested is what runs.

SHELL      := /bin/bash
SEEDS      ?= 10000
SECONDS    ?= 60
MINUTES    ?= 30
FUZZ_RUNS  ?= 1000000
CARGO      ?= cargo
export CARGO_TERM_COLOR ?= auto
export SEEDS FUZZ_RUNS CARGO

PREFIX     ?= /usr/local
export PREFIX

.PHONY: all build deb install uninstall deps test test-unit test-sim test-qemu fuzz plant-faults demo guests stock-vm bench bench-quick bench-storage soak tidy lint clean-demo help

all: build

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

deps: ## Install what tests and demo need from the distribution's packages
	@scripts/install-deps.sh

build: ## Build the product
	$(CARGO) build --release -p godwit

deb: build ## Make the Debian package below target/deb
	@scripts/deb.sh

install: ## Install what 'make build' made below PREFIX=/usr/local; DESTDIR= for packagers
	@scripts/install.sh install

uninstall: ## Take it away again; refused while VMs run here, records are kept
	@scripts/install.sh uninstall

guests: deps ## Make the guest images below target/guests
	$(CARGO) build --release -p godwit-testkit
	target/release/guest-image

demo: deps ## Move a Debian with a loaded PostgreSQL and its disk between two hosts on this machine and back
	@scripts/demo.sh

bench: ## Measure moves of memory against QEMU's own migration, the whole set (about an hour and a half)
	@scripts/bench.sh

bench-quick: ## A small part of it, under 8 minutes
	@scripts/bench.sh --quick

bench-storage: ## Measure moves of disks against QEMU's block mirror (more than an hour); ARGS=--quick for 6 minutes, --paper for 25
	@scripts/bench.sh storage $(ARGS)

stock-vm: deps ## Two emulated machines with Debian and KVM: a Linux guest moves between their kernels (30 minutes)
	@scripts/stock-vm.sh

soak: deps ## Break three hosts at random for MINUTES=30 and check from outside; SEED=n, SOAK='--without NAME'
	@scripts/soak.sh --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(SOAK)

test: deps ## Run everything that must pass
	@scripts/test.sh

test-unit: ## Unit and property tests only
	@scripts/test.sh unit

test-sim: ## Ownership simulator; SEEDS=n
	$(CARGO) run --release -q -p godwit-sim -- --seeds $(SEEDS)

test-qemu: deps ## Real-QEMU cases only
	@scripts/test.sh qemu

fuzz: ## Fuzz every decoder for SECONDS=n each
	$(CARGO) run --release -q -p godwit-fuzz -- --seconds $(SECONDS)

plant-faults: deps ## Plant each known fault and show that its test fails
	@scripts/plant-faults.sh

lint: ## Formatting, lints and the layering check
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	$(CARGO) run --release -q -p xtask -- tidy

tidy: ## The layering and size check only
	$(CARGO) run --release -q -p xtask -- tidy
