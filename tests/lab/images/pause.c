// First process of a Pod's sandbox: waits to be told to end, and reaps what the Pod's other processes leave.
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

int main(void) {
  sigset_t set;
  int sig;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  // Blocked before anything can end: nothing is missed between two waits.
  sigprocmask(SIG_BLOCK, &set, NULL);
  for (;;) {
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
    if (sigwait(&set, &sig) == 0 && sig != SIGCHLD) {
      return EXIT_SUCCESS;
    }
  }
}
