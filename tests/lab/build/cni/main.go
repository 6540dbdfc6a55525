// Calls a network's GC as a container runtime does: with the attachments that it has. The library's own tool has no list to give.
//
// Usage: cni-gc NETWORK CACHE [NETNS]...; attachments are those that cnitool made in these namespaces, all as eth0. What is in the
// library's cache and not named is deleted by the library itself; with an empty CACHE everything is the plugin's to find.
package main

import (
	"context"
	"crypto/sha512"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

func run() error {
	if len(os.Args) < 3 {
		return fmt.Errorf("usage: cni-gc NETWORK CACHE [NETNS]")
	}
	list, err := libcni.LoadNetworkConf(os.Getenv("NETCONFPATH"), os.Args[1])
	if err != nil {
		return err
	}
	valid := []types.GCAttachment{}
	for _, netns := range os.Args[3:] {
		sum := sha512.Sum512([]byte(netns))
		valid = append(valid, types.GCAttachment{ContainerID: fmt.Sprintf("cnitool-%x", sum[:10]), IfName: "eth0"})
	}
	paths := filepath.SplitList(os.Getenv("CNI_PATH"))
	config := libcni.NewCNIConfigWithCacheDir(paths, os.Args[2], nil)
	return config.GCNetworkList(context.Background(), list, &libcni.GCArgs{ValidAttachments: valid})
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
