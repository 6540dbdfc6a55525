// The far end of the prober's batch runner, in its image: makes the connections that `agnhost connect` would, all at
// the same time and without a program for each. As there, a name's resolution does not count as the connection's time.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/worker"
)

const patience = 2 * time.Second

func main() {
	jobs := flag.String("jobs", "", "a batch, as JSON")
	flag.Parse()
	var batch worker.Batch
	if err := json.Unmarshal([]byte(*jobs), &batch); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	addresses := map[string]string{}
	for _, request := range batch.Requests {
		if _, known := addresses[request.Host]; !known {
			addresses[request.Host] = resolve(request.Host)
		}
	}
	results := make([]*worker.Result, len(batch.Requests))
	var all sync.WaitGroup
	for i, request := range batch.Requests {
		all.Go(func() { results[i] = answer(request, addresses[request.Host]) })
	}
	all.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
		os.Exit(1)
	}
}

// The name itself when it has no address: connecting says why.
func resolve(host string) string {
	if found, err := net.LookupHost(host); err == nil {
		return found[0]
	}
	return host
}

func answer(request *worker.Request, host string) *worker.Result {
	result := &worker.Result{Request: request}
	address := net.JoinHostPort(host, strconv.Itoa(request.Port))
	if err := connect(strings.ToLower(string(request.Protocol)), address); err != nil {
		result.Error = err.Error()
	}
	return result
}

// A TCP connection proves itself, a datagram by its answer.
func connect(protocol, address string) error {
	connection, err := net.DialTimeout(protocol, address, patience)
	if err != nil || protocol == "tcp" {
		if err == nil {
			err = connection.Close()
		}
		return err
	}
	defer connection.Close()
	if err := connection.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := connection.Write([]byte("hostname\n")); err != nil {
		return err
	}
	read, err := connection.Read(make([]byte, 1024))
	if err == nil && read == 0 {
		return fmt.Errorf("an empty answer from %s", address)
	}
	return err
}
