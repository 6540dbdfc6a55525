//go:build suite

// Package kubernetes keeps the end-to-end suite, which is a test and no program, among the pins.
package kubernetes

import _ "k8s.io/kubernetes/test/e2e"
