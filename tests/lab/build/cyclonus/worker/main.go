// The far end of the prober's batch runner, in its image: makes the connections that `agnhost connect` would, all at
// the same time and without a program for each. As there, a name's resolution does not count as the connection's time.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
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
	addresses := resolve(batch.Requests)
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

// The first address of every name; names that have none, or are not told in time, are left out.
func resolve(requests []*worker.Request) map[string]string {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	addresses := map[string]string{}
	var lock sync.Mutex
	var all sync.WaitGroup
	for _, request := range requests {
		addresses[request.Host] = ""
	}
	for host := range maps.Clone(addresses) {
		all.Go(func() {
			if found, err := net.DefaultResolver.LookupHost(ctx, host); err == nil {
				lock.Lock()
				addresses[host] = found[0]
				lock.Unlock()
			}
		})
	}
	all.Wait()
	return addresses
}

func answer(request *worker.Request, address string) *worker.Result {
	result := &worker.Result{Request: request}
	if address == "" {
		result.Error = "no address"
		return result
	}
	address = net.JoinHostPort(address, strconv.Itoa(request.Port))
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
