// Pins the library by which container runtimes call plugins; `cargo xtask lab build` builds a program of it.
module flowloom.invalid/lab/cni

go 1.26.0

require github.com/containernetworking/cni v1.3.0
