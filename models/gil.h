// The interpreter's lock, released and taken again so that a thread survives the end of the interpreter.
//
// A daemon thread that needs the lock while the interpreter ends is ended by Python before 3.14 with pthread_exit. Its
// unwinding through C++ would call std::terminate, and hide the program's own exit status. Such a thread waits here for the
// end of the process instead, as Python 3.14 lets it. No other release of the lock may be used.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

[[noreturn]] inline void wait_for_end_of_process() {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Calls run(). Where Python ends the thread in it, the call never returns.
template <class Run>
void stay_if_thread_ends(const Run& run) {
#if defined(__GLIBCXX__)
    try {
        run();
    } catch (abi::__forced_unwind&) {
        wait_for_end_of_process();  // to leave this block would be an error
    }
#else
    run();  // pthread_exit unwinds nothing there
#endif
}

// While it lives, other threads have the lock.
class ReleasedGil {
public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        stay_if_thread_ends([this] { PyEval_RestoreThread(state_); });
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

private:
    PyThreadState* state_;
};

// While it lives, this thread has the lock, whether Python knows the thread or not.
class HeldGil {
public:
    HeldGil() {
        // Of a thread that has no state yet Python would make one, for an interpreter that may be gone.
        const bool is_mine = PyGILState_GetThisThreadState() && PyGILState_Check();
        if (!Py_IsInitialized() && !is_mine) wait_for_end_of_process();
        stay_if_thread_ends([this] { state_ = PyGILState_Ensure(); });
    }
    ~HeldGil() { PyGILState_Release(state_); }
    HeldGil(const HeldGil&) = delete;
    HeldGil& operator=(const HeldGil&) = delete;

private:
    PyGILState_STATE state_{};
};
