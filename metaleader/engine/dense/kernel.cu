// The meta-gradient of one task of a multilayer perceptron by one thread block: Eq. 5 by the adjoint recursion.
//
// Notation, for a layer with weight W, inputs a and outputs z = a W^T + b: `slope` is the derivative of the loss with
// respect to z, and a name with `dot` is a derivative in the direction v = D lambda, D the diagonal of step sizes.
//
//     z_dot = a_dot W^T + a v_W^T + v_b            a_dot = act'(z) z_dot of the layer below
//     slope_dot below = (slope_dot W + slope v_W) act'(z) + (slope W) act''(z) z_dot
//     (H v)_W = slope_dot^T a + slope^T a_dot      (H v)_b = the sum of slope_dot over rows
//
// `plan.py` puts the constants in capitals in front of this file: sizes, the mode, and where each array begins in the
// arena, the memory of a task in floats. Rows of arrays are padded with zeros to a multiple of four floats, and to a
// stride that spreads rows over the banks of shared memory. All sums have a fixed order.
//
// Without __CUDACC__ the file is plain C++ for one thread per task, in which the tests run it.

#ifdef __CUDACC__
#define SYNCHRONIZE() __syncthreads()
#else
#include <cmath>
#define __forceinline__ inline
#define __global__
#define SYNCHRONIZE()
struct alignas(16) float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static const struct { int x; } threadIdx{0};
static struct { int x, y; } blockIdx{0, 0};
#endif

// Run the body for i = 0 .. count - 1, divided among the threads of the block.
#define FOR_EACH(i, count) for (int i = threadIdx.x; i < (count); i += THREADS)

enum Activation { RELU, TANH, SIGMOID, SILU, GELU };
constexpr bool NEEDS_Z = ACTIVATION == SILU || ACTIVATION == GELU;

template <int L> struct Layer {
    static constexpr int inputs = WIDTH[L], outputs = WIDTH[L + 1];
    static constexpr int in = STRIDE[L], out = STRIDE[L + 1];  // strides of rows
    static constexpr int weight = WEIGHT[L], bias = BIAS[L];   // in a set of parameters
    static constexpr bool first = L == 0, last = L == LAYERS - 1;
};

__device__ __forceinline__ constexpr int quads(int n) { return (n + 3) / 4; }
// The number of rows that a thread computes at once, so that all threads have work.
__device__ __forceinline__ constexpr int tile_of(int num_outputs) {
    const int even = (num_outputs + THREADS - 1) / THREADS;
    return even < MAX_TILE ? even : MAX_TILE;
}
__device__ __forceinline__ float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ void store4(float* at, float4 v) { *reinterpret_cast<float4*>(at) = v; }
__device__ __forceinline__ void add4(float4& sum, float a, float4 b) {
    sum.x += a * b.x; sum.y += a * b.y; sum.z += a * b.z; sum.w += a * b.w;
}
__device__ __forceinline__ void dot4(float4& sum, float4 a, float4 b) {
    sum.x += a.x * b.x; sum.y += a.y * b.y; sum.z += a.z * b.z; sum.w += a.w * b.w;
}
__device__ __forceinline__ float total4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ __forceinline__ float lane(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ float activate(float z) {
    if constexpr (ACTIVATION == RELU)  // NaN stays NaN
        return z <= 0.0f ? (NEGATIVE_SLOPE > 0 ? NEGATIVE_SLOPE * z : 0.0f) : z;
    if constexpr (ACTIVATION == TANH) return tanhf(z);
    if constexpr (ACTIVATION == GELU) return z * 0.5f * (1.0f + erff(z * 0.7071067811865476f));
    float share = 1.0f / (1.0f + expf(-z));
    return ACTIVATION == SIGMOID ? share : z * share;
}

// The first and second derivative of the activation, from its argument where it is stored, else from its value.
__device__ __forceinline__ void derivatives(float a, float z, float& first, float& second) {
    if constexpr (ACTIVATION == RELU) {
        first = a <= 0.0f ? NEGATIVE_SLOPE : 1.0f;
        second = 0.0f;
    } else if constexpr (ACTIVATION == TANH) {
        first = 1.0f - a * a;
        second = -2.0f * a * first;
    } else if constexpr (ACTIVATION == GELU) {
        float density = expf(-0.5f * z * z) * 0.3989422804014327f;
        first = 0.5f * (1.0f + erff(z * 0.7071067811865476f)) + z * density;
        second = density * (2.0f - z * z);
    } else if constexpr (ACTIVATION == SIGMOID) {
        first = a * (1.0f - a);
        second = first * (1.0f - 2.0f * a);
    } else {
        float share = 1.0f / (1.0f + expf(-z)), slope = share * (1.0f - share);
        first = share + z * slope;
        second = slope * (2.0f + z * (1.0f - 2.0f * share));
    }
}

// The arrays of one pass over rows (an inner step, or the query) and those of an adjoint step.
template <int L> __device__ __forceinline__ float* inputs_of(float* pass, float* x) {
    if constexpr (L == 0) return x; else return pass + VALUE[L];
}

template <int L> __device__ __forceinline__ float4 first_derivatives(const float* pass, int at) {
    const float4 value = load4(pass + VALUE[L] + at), z = NEEDS_Z ? load4(pass + ARGUMENT[L] + at) : value;
    float4 first;
    float unused;
    derivatives(value.x, z.x, first.x, unused);
    derivatives(value.y, z.y, first.y, unused);
    derivatives(value.z, z.z, first.z, unused);
    derivatives(value.w, z.w, first.w, unused);
    return first;
}
__device__ __forceinline__ float4 times4(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// z = a W^T + b, and the inputs of the next layer or the outputs.
template <int L, int ROWS> __device__ void forward(const float* theta, float* x, float* pass) {
    using Here = Layer<L>;
    const float* a = inputs_of<L>(pass, x);
    const float* weight = theta + Here::weight;
    constexpr int tile = tile_of(ROWS * Here::outputs);
    FOR_EACH(t, Here::outputs * ((ROWS + tile - 1) / tile)) {
        const int o = t % Here::outputs, r0 = t / Here::outputs * tile;
        float4 sums[tile] = {};
#pragma unroll 4
        for (int i = 0; i < quads(Here::inputs); ++i) {
            const float4 w = load4(weight + o * Here::in + 4 * i);
#pragma unroll
            for (int k = 0; k < tile; ++k)
                if (r0 + k < ROWS) dot4(sums[k], load4(a + (r0 + k) * Here::in + 4 * i), w);
        }
        const float bias = theta[Here::bias + o];
#pragma unroll
        for (int k = 0; k < tile; ++k) {
            if (r0 + k >= ROWS) continue;
            const int at = (r0 + k) * Here::out + o;
            const float z = total4(sums[k]) + bias;
            if constexpr (Here::last) {
                pass[SLOPE[L] + at] = z;
            } else {
                pass[VALUE[L + 1] + at] = activate(z);
                if constexpr (NEEDS_Z) pass[ARGUMENT[L + 1] + at] = z;
            }
        }
    }
    SYNCHRONIZE();
    if constexpr (!Here::last) forward<L + 1, ROWS>(theta, x, pass);
}

// Replace the outputs of a pass by their slopes, and store the loss of each row.
template <int ROWS> __device__ void slopes_of_outputs(float* pass, const float* targets, float* losses) {
    constexpr int outputs = WIDTH[LAYERS], stride = STRIDE[LAYERS];
    float* slope = pass + SLOPE[LAYERS - 1];
    if constexpr (LABELS) {
        FOR_EACH(r, ROWS) {
            float* row = slope + r * stride;
            const int label = reinterpret_cast<const int*>(targets)[r];
            const bool known = label >= 0 && label < outputs;
            float top = row[0], sum = 0.0f, loss = 0.0f;
            for (int o = 1; o < outputs; ++o) top = row[o] > top || row[o] != row[o] ? row[o] : top;
            for (int o = 0; o < outputs; ++o) sum += expf(row[o] - top);
            const float log_sum = logf(sum);
            for (int o = 0; o < outputs; ++o) {
                const float log_share = row[o] - top - log_sum, share = expf(row[o] - top) / sum;
                const float share_of_label = o == label ? 1.0f - SMOOTHING : 0.0f;
                const float target = known ? share_of_label + SMOOTHING / outputs : nanf("");
                loss -= target * log_share;
                pass[SHARE + r * stride + o] = share;
                row[o] = (share - target) / ROWS;
            }
            losses[r] = loss;
        }
    } else {
        FOR_EACH(r, ROWS) {
            float loss = 0.0f;
            for (int o = 0; o < outputs; ++o) {
                const float error = slope[r * stride + o] - targets[r * outputs + o];
                loss += error * error;
                slope[r * stride + o] = error * (2.0f / (ROWS * outputs));
            }
            losses[r] = loss / outputs;
        }
    }
    SYNCHRONIZE();
}

// A tile of first^T second, summed over rows, for 2 outputs and 4 inputs.
template <int L, int ROWS>
__device__ __forceinline__ void outer_tile(const float* first, const float* second, int o, int i, float4* sums) {
    using Here = Layer<L>;
#pragma unroll 5
    for (int r = 0; r < ROWS; ++r) {
        const float4 b = load4(second + r * Here::in + i);
        add4(sums[0], first[r * Here::out + o], b);
        if (o + 1 < Here::outputs) add4(sums[1], first[r * Here::out + o + 1], b);
    }
}

constexpr __device__ int rounded(int n) { return (n + 31) / 32 * 32; }

// The gradient of the weights and biases of a layer, and the slopes of the layer below. With DESCEND the result is the
// parameters after one gradient step, else the gradient.
template <int L, int ROWS, bool DESCEND>
__device__ void backward(const float* theta, float* x, float* pass, const float* rates, float* result) {
    using Here = Layer<L>;
    const float* a = inputs_of<L>(pass, x);
    const float* slope = pass + SLOPE[L];
    constexpr int columns = quads(Here::inputs), pairs = (Here::outputs + 1) / 2;
    constexpr int below = Here::first ? 0 : rounded(columns * ROWS), weights = rounded(columns * pairs);
    FOR_EACH(t, below + weights + Here::outputs) {
        if (t < below) {
            if (t >= columns * ROWS) continue;
            const int r = t / columns, i = t % columns * 4;
            float4 sum = {};
#pragma unroll 2
            for (int o = 0; o < quads(Here::outputs); ++o) {
                const float4 s = load4(slope + r * Here::out + 4 * o);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int at = Here::weight + (4 * o + k) * Here::in + i;
                    if (4 * o + k < Here::outputs) add4(sum, lane(s, k), load4(theta + at));
                }
            }
            if constexpr (!Here::first) {
                const int at = r * Here::in + i;
                if constexpr (DESCEND && SECOND && ACTIVATION != RELU) store4(pass + BELOW[L] + at, sum);
                const float4 first = first_derivatives<L>(pass, at);
                store4(pass + SLOPE[L - 1] + at, times4(sum, first));
            }
        } else if (t < below + weights) {
            if (t - below >= columns * pairs) continue;
            const int o = (t - below) / columns * 2, i = (t - below) % columns * 4;
            float4 sums[2] = {};
            outer_tile<L, ROWS>(slope, a, o, i, sums);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (o + k >= Here::outputs) continue;
                const int at = Here::weight + (o + k) * Here::in + i;
                if constexpr (DESCEND) {
                    float4 w = load4(theta + at);
                    add4(w, -rates[2 * L], sums[k]);
                    sums[k] = w;
                }
                store4(result + at, sums[k]);
            }
        } else {
            const int o = t - below - weights;
            float sum = 0.0f;
            for (int r = 0; r < ROWS; ++r) sum += slope[r * Here::out + o];
            result[Here::bias + o] = DESCEND ? theta[Here::bias + o] - rates[2 * L + 1] * sum : sum;
        }
    }
    SYNCHRONIZE();
    if constexpr (!Here::first) backward<L - 1, ROWS, DESCEND>(theta, x, pass, rates, result);
}

// The derivatives of all outputs in the direction D lambda, at the pass of an inner step.
template <int L>
__device__ void forward_dot(
    const float* theta, const float* lambda, float* x, float* pass, float* dots, const float* rates) {
    using Here = Layer<L>;
    const float* a = inputs_of<L>(pass, x);
    constexpr int tile = tile_of(SUPPORT * Here::outputs);
    FOR_EACH(t, Here::outputs * ((SUPPORT + tile - 1) / tile)) {
        const int o = t % Here::outputs, r0 = t / Here::outputs * tile;
        float4 moved[tile] = {}, carried[tile] = {};
#pragma unroll 4
        for (int i = 0; i < quads(Here::inputs); ++i) {
            const float4 v = load4(lambda + Here::weight + o * Here::in + 4 * i);
            const float4 w = load4(theta + Here::weight + o * Here::in + 4 * i);
#pragma unroll
            for (int k = 0; k < tile; ++k) {
                if (r0 + k >= SUPPORT) continue;
                dot4(moved[k], load4(a + (r0 + k) * Here::in + 4 * i), v);
                if constexpr (!Here::first)
                    dot4(carried[k], load4(dots + VALUE[L] + (r0 + k) * Here::in + 4 * i), w);
            }
        }
        const float bias = rates[2 * L + 1] * lambda[Here::bias + o];
#pragma unroll
        for (int k = 0; k < tile; ++k) {
            if (r0 + k >= SUPPORT) continue;
            const int at = (r0 + k) * Here::out + o;
            const float z_dot = rates[2 * L] * total4(moved[k]) + total4(carried[k]) + bias;
            if constexpr (Here::last) {
                dots[SLOPE[L] + at] = LABELS ? z_dot : z_dot * (2.0f / (SUPPORT * Here::outputs));
            } else {
                float first, second;
                const float value = pass[VALUE[L + 1] + at];
                derivatives(value, NEEDS_Z ? pass[ARGUMENT[L + 1] + at] : value, first, second);
                dots[VALUE[L + 1] + at] = first * z_dot;
                if constexpr (ACTIVATION != RELU)
                    dots[BELOW[L + 1] + at] = second * z_dot * pass[BELOW[L + 1] + at];
            }
        }
    }
    SYNCHRONIZE();
    if constexpr (!Here::last) forward_dot<L + 1>(theta, lambda, x, pass, dots, rates);
}

// With labels, the derivatives of the slopes of the outputs from those of the outputs.
__device__ void slopes_dot_of_outputs(const float* pass, float* dots) {
    constexpr int outputs = WIDTH[LAYERS], stride = STRIDE[LAYERS];
    FOR_EACH(r, SUPPORT) {
        float* row = dots + SLOPE[LAYERS - 1] + r * stride;
        const float* share = pass + SHARE + r * stride;
        float sum = 0.0f;
        for (int o = 0; o < outputs; ++o) sum += share[o] * row[o];
        for (int o = 0; o < outputs; ++o) row[o] = share[o] * (row[o] - sum) / SUPPORT;
    }
    SYNCHRONIZE();
}

// lambda - H D lambda.
template <int L>
__device__ void backward_dot(
    const float* theta, const float* lambda, float* x, float* pass, float* dots, const float* rates, float* result) {
    using Here = Layer<L>;
    const float* a = inputs_of<L>(pass, x);
    const float* slope = pass + SLOPE[L];
    const float* slope_dot = dots + SLOPE[L];
    constexpr int columns = quads(Here::inputs), pairs = (Here::outputs + 1) / 2;
    constexpr int below = Here::first ? 0 : rounded(columns * SUPPORT), weights = rounded(columns * pairs);
    FOR_EACH(t, below + weights + Here::outputs) {
        if (t < below) {
            if (t >= columns * SUPPORT) continue;
            const int r = t / columns, i = t % columns * 4;
            float4 carried = {}, moved = {};
#pragma unroll 2
            for (int o = 0; o < quads(Here::outputs); ++o) {
                const float4 s = load4(slope + r * Here::out + 4 * o), s_dot = load4(slope_dot + r * Here::out + 4 * o);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (4 * o + k >= Here::outputs) continue;
                    const int at = Here::weight + (4 * o + k) * Here::in + i;
                    add4(carried, lane(s_dot, k), load4(theta + at));
                    add4(moved, lane(s, k), load4(lambda + at));
                }
            }
            if constexpr (!Here::first) {
                const int at = r * Here::in + i;
                add4(carried, rates[2 * L], moved);
                const float4 first = first_derivatives<L>(pass, at);
                float4 sum = times4(carried, first);
                if constexpr (ACTIVATION != RELU) add4(sum, 1.0f, load4(dots + BELOW[L] + at));
                store4(dots + SLOPE[L - 1] + at, sum);
            }
        } else if (t < below + weights) {
            if (t - below >= columns * pairs) continue;
            const int o = (t - below) / columns * 2, i = (t - below) % columns * 4;
            float4 sums[2] = {};
            outer_tile<L, SUPPORT>(slope_dot, a, o, i, sums);
            if constexpr (!Here::first) outer_tile<L, SUPPORT>(slope, dots + VALUE[L], o, i, sums);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (o + k >= Here::outputs) continue;
                float4 value = load4(lambda + Here::weight + (o + k) * Here::in + i);
                add4(value, -1.0f, sums[k]);
                store4(result + Here::weight + (o + k) * Here::in + i, value);
            }
        } else {
            const int o = t - below - weights;
            float sum = 0.0f;
            for (int r = 0; r < SUPPORT; ++r) sum += slope_dot[r * Here::out + o];
            result[Here::bias + o] = lambda[Here::bias + o] - sum;
        }
    }
    SYNCHRONIZE();
    if constexpr (!Here::first) backward_dot<L - 1>(theta, lambda, x, pass, dots, rates, result);
}

// Copy parameters between flat order and padded rows.
template <int L> __device__ void unpack(const float* flat, float* params) {
    using Here = Layer<L>;
    FOR_EACH(t, Here::inputs * Here::outputs)
        params[Here::weight + t / Here::inputs * Here::in + t % Here::inputs] = flat[FLAT_WEIGHT[L] + t];
    FOR_EACH(o, Here::outputs) params[Here::bias + o] = FLAT_BIAS[L] < 0 ? 0.0f : flat[FLAT_BIAS[L] + o];
    if constexpr (!Here::last) unpack<L + 1>(flat, params);
}

template <int L> __device__ void pack(const float* params, float* flat) {
    using Here = Layer<L>;
    FOR_EACH(t, Here::inputs * Here::outputs)
        flat[FLAT_WEIGHT[L] + t] = params[Here::weight + t / Here::inputs * Here::in + t % Here::inputs];
    if constexpr (FLAT_BIAS[L] >= 0) {
        FOR_EACH(o, Here::outputs) flat[FLAT_BIAS[L] + o] = params[Here::bias + o];
    }
    if constexpr (!Here::last) pack<L + 1>(params, flat);
}

// Copy the datapoints of a task: inputs to padded rows, targets as they are, labels as int.
template <int ROWS, typename Target>
__device__ void copy_data(const float* x, const Target* y, long long task, float* to_x, float* to_y) {
    FOR_EACH(t, ROWS * WIDTH[0]) to_x[t / WIDTH[0] * STRIDE[0] + t % WIDTH[0]] = x[task * ROWS * WIDTH[0] + t];
    FOR_EACH(t, ROWS * TARGETS) {
        const Target value = y[task * ROWS * TARGETS + t];
        if constexpr (LABELS)  // a label that does not fit into an int is out of range
            reinterpret_cast<int*>(to_y)[t] = value >= 0 && value < WIDTH[LAYERS] ? static_cast<int>(value) : -1;
        else
            to_y[t] = static_cast<float>(value);
    }
}

// The loss of a task after the inner steps, and its gradient: one block per task.
//
// Shapes, for T = learners * tasks: flat (learners, TOTAL), rates (2 LAYERS: of the weight and the bias of each layer),
// support_x (T, SUPPORT, inputs), query_x (T, QUERY, inputs), support_y and query_y likewise, gradients (T, TOTAL),
// losses (T), scratch (T, ARENA) if the arena does not fit into shared memory.
extern "C" __global__ void task_gradient(
    const float* flat, const float* rates, const float* support_x, const SupportTarget* support_y, const float* query_x,
    const QueryTarget* query_y, float* scratch, float* gradients, float* losses, int tasks) {
    const long long task = blockIdx.x;
#ifdef IN_SHARED_MEMORY
    extern __shared__ float4 shared[];
    float* arena = reinterpret_cast<float*>(shared);
#else
    float* arena = scratch + task * ARENA;
#endif
    FOR_EACH(i, ARENA / 4) store4(arena + 4 * i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    SYNCHRONIZE();
    unpack<0>(flat + task / tasks * TOTAL, arena + THETA);
    FOR_EACH(i, 2 * LAYERS) arena[RATES + i] = rates[i];
    if constexpr (STEPS > 0) copy_data<SUPPORT>(support_x, support_y, task, arena + SUPPORT_X, arena + SUPPORT_Y);
    copy_data<QUERY>(query_x, query_y, task, arena + QUERY_X, arena + QUERY_Y);
    SYNCHRONIZE();
    float *x = arena + SUPPORT_X, *row_losses = arena + ROW_LOSSES;
    const float* step_sizes = arena + RATES;
    for (int s = 0; s < STEPS; ++s) {
        float *theta = arena + THETA + s * PARAMS, *pass = arena + PASSES + s * PASS;
        forward<0, SUPPORT>(theta, x, pass);
        slopes_of_outputs<SUPPORT>(pass, arena + SUPPORT_Y, row_losses);
        backward<LAYERS - 1, SUPPORT, true>(theta, x, pass, step_sizes, theta + PARAMS);
    }
    float *theta = arena + THETA + STEPS * PARAMS, *pass = arena + PASSES + STEPS * PASS, *lambda = arena + LAMBDA;
    forward<0, QUERY>(theta, arena + QUERY_X, pass);
    slopes_of_outputs<QUERY>(pass, arena + QUERY_Y, row_losses);
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int r = 0; r < QUERY; ++r) sum += row_losses[r];
        losses[task] = sum / QUERY;
    }
    backward<LAYERS - 1, QUERY, false>(theta, arena + QUERY_X, pass, step_sizes, lambda);
    if constexpr (SECOND) {
        // The parameters and the pass of the query are not needed any more.
        float *next = theta, *dots = pass;
        for (int s = STEPS - 1; s >= 0; --s) {
            theta = arena + THETA + s * PARAMS, pass = arena + PASSES + s * PASS;
            forward_dot<0>(theta, lambda, x, pass, dots, step_sizes);
            if constexpr (LABELS) slopes_dot_of_outputs(pass, dots);
            backward_dot<LAYERS - 1>(theta, lambda, x, pass, dots, step_sizes, next);
            float* swapped = lambda;
            lambda = next, next = swapped;
        }
    }
    pack<0>(lambda, gradients + task * TOTAL);
}

// The means over the tasks of a learner, in a fixed order: gradients (learners * tasks, TOTAL) and losses. One block
// per THREADS parameters (x) and learner (y).
extern "C" __global__ void mean_over_tasks(
    const float* gradients, const float* losses, float* mean_gradients, float* mean_losses, int tasks) {
    const long long learner = blockIdx.y;
    const float* rows = gradients + learner * tasks * TOTAL;
    FOR_EACH(k, THREADS) {
        const int i = blockIdx.x * THREADS + k;
        if (i >= TOTAL) continue;
        float sum = 0.0f;
#pragma unroll 8
        for (int t = 0; t < tasks; ++t) sum += rows[static_cast<long long>(t) * TOTAL + i];
        mean_gradients[learner * TOTAL + i] = sum / tasks;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int t = 0; t < tasks; ++t) sum += losses[learner * tasks + t];
        mean_losses[learner] = sum / tasks;
    }
}

#ifndef __CUDACC__
extern "C" void run(
    int learners, int tasks, const float* flat, const float* rates, const float* support_x,
    const SupportTarget* support_y, const float* query_x, const QueryTarget* query_y, float* scratch, float* gradients,
    float* losses, float* mean_gradients, float* mean_losses) {
    for (blockIdx.x = 0; blockIdx.x < learners * tasks; ++blockIdx.x)
        task_gradient(flat, rates, support_x, support_y, query_x, query_y, scratch, gradients, losses, tasks);
    for (blockIdx.y = 0; blockIdx.y < learners; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < (TOTAL + THREADS - 1) / THREADS; ++blockIdx.x)
            mean_over_tasks(gradients, losses, mean_gradients, mean_losses, tasks);
}
#endif
