// The policy prober with its own batch runner, which its command does not offer: one process in each Pod makes all of
// the Pod's connections. Otherwise every connection is a `kubectl exec`, 324 for a table. Cases, expectations and
// judgement are the prober's.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/kube"
	v1 "k8s.io/api/core/v1"
)

func main() {
	junit := flag.String("junit-results-file", "", "where results go")
	include := flag.String("include", "", "tags of cases, all when empty")
	exclude := flag.String("exclude", "", "tags of cases to leave out")
	flag.Parse()
	if err := run(*junit, words(*include), words(*exclude)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func words(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' })
}

func run(junit string, include, exclude []string) error {
	if err := generator.ValidateTags(append(include, exclude...)); err != nil {
		return err
	}
	cluster, err := kube.NewKubernetesForContext("")
	if err != nil {
		return err
	}
	namespaces, pods, ports := []string{"x", "y", "z"}, []string{"a", "b", "c"}, []int{80, 81}
	protocols := []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}
	servers, err := probe.NewDefaultResources(cluster, namespaces, pods, ports, protocols, nil, 120, true, "")
	if err != nil {
		return err
	}
	target, err := servers.GetPod("z", "c")
	if err != nil {
		return err
	}
	interpreter := connectivity.NewInterpreter(cluster, servers, &connectivity.InterpreterConfig{
		ResetClusterBeforeTestCase:       true,
		KubeProbeRetries:                 2,
		PerturbationWaitSeconds:          1,
		VerifyClusterStateBeforeTestCase: true,
		BatchJobs:                        true,
		JobTimeoutSeconds:                1,
		// The API: Pods cannot be kept from themselves. The prober's model would have it.
		IgnoreLoopback: true,
	})
	printer := &connectivity.Printer{JunitResultsFile: junit, IgnoreLoopback: true}
	cases := generator.NewTestCaseGenerator(true, target.IP, namespaces, include, exclude).GenerateTestCases()
	for i, testCase := range cases {
		fmt.Printf("case %d of %d: %s\n", i+1, len(cases), testCase.Description)
		result := interpreter.ExecuteTestCase(testCase)
		if result.Err != nil {
			return result.Err
		}
		printer.PrintTestCaseResult(result)
	}
	printer.PrintSummary()
	for _, namespace := range namespaces {
		if err := cluster.DeleteNamespace(namespace); err != nil {
			return err
		}
	}
	return nil
}
