// The only process of the machine that emulate_x86.py boots: runs dump_bits with the kernel's arguments, and turns off.
#include <stdio.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int n_arguments, char** arguments) {
    (void)n_arguments;
    puts("BEGIN");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        execv("/dump_bits", arguments);
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("END %d\n", status);
    fflush(stdout);
    sleep(1);
    reboot(RB_POWER_OFF);
}
