// Serves six users' prompts in two rounds, by one engine or by several that share a cache, each in a thread.
#include "engine.h"

#include <cstdio>
#include <cstdlib>

constexpr int USERS = 6;

// All users' prompts, two at a time, in two rounds: the text to print, a line for each answer.
static std::string served(Engine& engine) {
    std::string text;
    for (int round = 0; round < 2; round++)
        for (int user = 0; user < USERS; user += 2) {
            std::vector<std::vector<int32_t>> prompts(2);
            for (int i = 0; i < 2; i++) {
                for (int t = 0; t < 24; t++) prompts[i].push_back((7 * t + 3) % VOCABULARY);  // what all begin with
                for (int t = 0; t < 27; t++) prompts[i].push_back(((user + i + 1) * (t + 5)) % VOCABULARY);
            }
            const auto answers = engine.answers(prompts);
            for (int i = 0; i < 4; i++) {
                text += "user " + std::to_string(user + i % 2) + (i < 2 ? " best:" : " second:");
                for (int32_t token : answers[i]) text += " " + std::to_string(token);
                text += "\n";
            }
        }
    return text;
}

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    PyConfig_SetBytesString(&config, &config.program_name, PYTHON);  // whose packages are found: pagedkv and NumPy
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 2;
    const pagedkv_api* kv = import_pagedkv();
    if (kv == nullptr) return PyErr_Print(), 2;
    PyThreadState* state = PyEval_SaveThread();  // from here on no thread of this engine holds the GIL

    pagedkv_options options = {BLOCK, 2, {22 * threads, 40 * threads, 0, 0}, "lru"};
    pagedkv_placement* placement = nullptr;
    if (kv->placement_new(&options, &placement) != PAGEDKV_OK) return 2;
    std::array<Arena, 2> arenas = {Arena(options.blocks[0]), Arena(options.blocks[1])};
    std::vector<std::string> texts(threads), errors(threads);
    std::vector<Counts> counts(threads);
    std::vector<std::thread> lanes;
    for (int i = 0; i < threads; i++)
        lanes.emplace_back([&, i] {
            try {
                Engine engine(kv, placement, arenas, std::to_string(i % 3));  // engine 3 shares with engine 0
                texts[i] = served(engine);
                counts[i] = engine.counts;
            } catch (const std::exception& error) {
                errors[i] = error.what();
            }
        });
    for (std::thread& lane : lanes) lane.join();
    Counts sum;
    for (const Counts& c : counts)
        sum.cached += c.cached, sum.prompt += c.prompt, sum.up += c.up, sum.down += c.down, sum.copies += c.copies;
    kv->placement_delete(placement);
    PyEval_RestoreThread(state);
    Py_FinalizeEx();
    for (int i = 0; i < threads; i++)
        if (!errors[i].empty() || texts[i] != texts[0]) {
            std::fprintf(stderr, "engine %d: %s\n", i, errors[i].empty() ? "other tokens" : errors[i].c_str());
            return 1;
        }
    std::printf("%scached %lld of %lld prompt tokens; %lld blocks went down, %lld up; %lld copies for forks\n",
                texts[0].c_str(), (long long)sum.cached, (long long)sum.prompt, (long long)sum.down, (long long)sum.up,
                (long long)sum.copies);
    return 0;
}
