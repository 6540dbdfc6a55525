// Starts /agnhost.upstream. Its `porter` ends at once where the kernel has no SCTP, and the suites' Pods, which have an
// SCTP server each beside the ones that are tested, would never be ready: there, it is not asked for one.
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef IPPROTO_SCTP
#define IPPROTO_SCTP 132
#endif

int main(int argc, char **argv, char **envp) {
  static const char prefix[] = "SERVE_SCTP_PORT_";
  if (argc > 1 && strcmp(argv[1], "porter") == 0) {
    int fd = socket(AF_INET, SOCK_STREAM, IPPROTO_SCTP);
    if (fd < 0) {
      char **kept = envp;
      for (char **e = envp; *e; e++) {
        if (strncmp(*e, prefix, sizeof prefix - 1) != 0) {
          *kept++ = *e;
        }
      }
      *kept = NULL;
    }
  }
  execve("/agnhost.upstream", argv, envp);
  perror("/agnhost.upstream");
  return 127;
}
