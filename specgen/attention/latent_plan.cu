// The work list of FlashInfer's kernel of latent attention for Hopper, made on the device from the lengths that are there.
//
// FlashInfer makes it on the host. Here the positions of all sequences, in tiles of 64, are one line, of which every
// cluster of blocks has an equal share: where a share ends within a sequence, the parts of its rows are merged behind.
// A sequence is in the line once for every group of its rows, as many as a cluster has room for with all of their heads.
//
// One block; what its threads write for one another lies in shared memory or, of many groups, in the list's last sections.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;           // positions of a tile, and rows (times heads) of a block
constexpr int kMostClusters = kThreads - 1;
constexpr int kFewGroups = 1024;    // for which there is room in shared memory
constexpr int kPartsPerTile = 16;   // merging so many parts takes about as long as attending to a tile

struct Problem {
  const int64_t* starts;      // [batch]: positions before the rows
  const int64_t* query_lens;  // [batch], or null: all have query_len
  const int64_t* first_rows;  // [batch], with query_lens
  int* list;                  // the sections of List
  int batch, query_len, groups, group_rows, num_heads, table_stride, room, cluster, num_clusters;  // groups of a sequence
};

// FlashInfer's MLAPlanInfo has all but the last two.
struct List {
  int *first_row, *first_page, *partial, *rows, *kv_len, *first_packed, *kv_begin, *kv_end;  // by item
  int* first_item;                                                                           // by cluster, and the end
  int *merged_begin, *merged_end, *parts_begin, *parts_end, *parts_stride;                   // by block
  int *first_tile, *group;  // by group with rows; of the first also the end

  // ``few`` has room for both of kFewGroups.
  __device__ List(const Problem& p, int* few) {
    const int groups = p.batch * p.groups, items = groups + p.num_clusters, blocks = p.num_clusters * p.cluster;
    int* next = p.list;
    const auto section = [&](int size) { int* const here = next; next += size; return here; };
    first_row = section(items), first_page = section(items), partial = section(items), rows = section(items);
    kv_len = section(items), first_packed = section(items), kv_begin = section(items), kv_end = section(items);
    first_item = section(p.num_clusters + 1);
    merged_begin = section(blocks), merged_end = section(blocks);
    parts_begin = section(blocks), parts_end = section(blocks), parts_stride = section(blocks);
    first_tile = section(groups + 1), group = section(groups);
    if (groups <= kFewGroups) first_tile = few, group = few + kFewGroups + 1;
  }
};

struct Group {
  int first_row, rows, kv_len;  // kv_len: what its last row sees

  __device__ Group(const Problem& p, int index) {
    const int sequence = index / p.groups, skipped = index % p.groups * p.group_rows;
    const int start = static_cast<int>(p.starts[sequence]);
    const int query_len = p.query_lens ? static_cast<int>(p.query_lens[sequence]) : p.query_len;
    const int with_room = min(query_len, p.room - start);  // others have no page: nobody reads what they would compute
    rows = max(min(with_room - skipped, p.group_rows), 0);
    first_row = (p.first_rows ? static_cast<int>(p.first_rows[sequence]) : sequence * p.query_len) + skipped;
    kv_len = start + skipped + rows;
  }

  __device__ int tiles() const { return rows > 0 ? (kv_len + kTile - 1) / kTile : 0; }
};

// The sums of x and y of all threads up to this one, this one's included.
__device__ int2 summed(int2 value) {
  __shared__ int2 sums[kThreads];
  const int t = threadIdx.x;
  sums[t] = value;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    int2 before = {0, 0};
    if (t >= distance) before = sums[t - distance];
    __syncthreads();
    value.x += before.x, value.y += before.y;
    sums[t] = value;
    __syncthreads();
  }
  return value;
}

// The last index below ``size`` at which ``sorted`` is no larger than ``value``.
__device__ int found(const int* sorted, int size, int value) {
  int low = 0, high = size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) latent_plan(const Problem p) {
  __shared__ int longest, num_tiles, num_groups;
  __shared__ int first_item[kThreads], borders[kThreads], cut_groups[kThreads];
  __shared__ int few[2 * kFewGroups + 1];
  const List list(p, few);
  const int t = threadIdx.x, all = p.batch * p.groups, each = (all + kThreads - 1) / kThreads;
  if (t == 0) longest = 0;
  __syncthreads();

  int2 mine = {0, 0};  // tiles, groups with rows
  int my_longest = 0;
  for (int g = t * each; g < min(all, (t + 1) * each); g++) {
    const int tiles = Group(p, g).tiles();
    mine.x += tiles, mine.y += tiles > 0;
    my_longest = max(my_longest, tiles);
  }
  if (my_longest) atomicMax(&longest, my_longest);
  const int2 until = summed(mine);
  int tile = until.x - mine.x, place = until.y - mine.y;
  for (int g = t * each; g < min(all, (t + 1) * each); g++) {
    const int tiles = Group(p, g).tiles();
    if (tiles == 0) continue;
    list.first_tile[place] = tile, list.group[place] = g;
    tile += tiles, place++;
  }
  if (t == kThreads - 1) {
    num_tiles = until.x, num_groups = until.y;
    list.first_tile[until.y] = until.x;
  }
  __syncthreads();

  int share = max((num_tiles + p.num_clusters - 1) / p.num_clusters, 1);
  while (static_cast<int64_t>(share) * share * kPartsPerTile < longest) share++;

  // A border lies before each cluster's share but the first; here those that cut a group, and the first of each group.
  const int border = min(t * share, num_tiles);
  const bool there = t <= p.num_clusters && border < num_tiles;
  const int before = there ? found(list.first_tile, num_groups, border) : num_groups;
  const bool cuts = there && border > list.first_tile[before];
  const int2 cut = summed({cuts, cuts && border - share <= list.first_tile[before]});
  borders[t] = cut.x, cut_groups[t] = cut.y, first_item[t] = before + cut.x;
  if (t <= p.num_clusters) list.first_item[t] = first_item[t];
  __syncthreads();

  const int room = kTile * p.cluster;  // rows of a part
  if (cuts) {  // this border's blocks merge their share of the group's rows
    const int begin = list.first_tile[before], end = list.first_tile[before + 1];
    const int first = begin / share + 1, count = (end + share - 1) / share - first;
    const Group group(p, list.group[before]);
    const int rows = group.rows * p.num_heads, blocks = count * p.cluster, chunk = (rows + blocks - 1) / blocks;
    const int part = (borders[first] - 1 + cut_groups[first] - 1) * room;
    for (int block = 0; block < p.cluster; block++) {
      const int low = min(((t - first) * p.cluster + block) * chunk, rows), high = min(low + chunk, rows);
      const int to = (cut.x - 1) * p.cluster + block;
      list.merged_begin[to] = group.first_row * p.num_heads + low;
      list.merged_end[to] = group.first_row * p.num_heads + high;
      list.parts_begin[to] = part + low;
      list.parts_end[to] = part + (count + 1) * room;
      list.parts_stride[to] = room;
    }
  }
  for (int to = borders[p.num_clusters] * p.cluster + t; to < p.num_clusters * p.cluster; to += kThreads) {
    list.merged_begin[to] = list.merged_end[to] = list.parts_begin[to] = list.parts_end[to] = 0;
    list.parts_stride[to] = 1;
  }

  for (int item = t; item < num_groups + borders[p.num_clusters]; item += kThreads) {
    const int cluster = found(first_item, p.num_clusters, item), of = item - borders[cluster];
    const int begin = list.first_tile[of], end = list.first_tile[of + 1];
    const int low = max(cluster * share, begin), high = min((cluster + 1) * share, end);
    const int index = list.group[of];
    const Group group(p, index);
    const int part = borders[cluster] + cut_groups[cluster] - (low > begin);
    list.first_row[item] = group.first_row;
    list.first_page[item] = index / p.groups * p.table_stride;
    list.partial[item] = low > begin || high < end ? part * room : -1;
    list.rows[item] = group.rows;
    list.kv_len[item] = group.kv_len;
    list.first_packed[item] = 0;
    list.kv_begin[item] = (low - begin) * kTile;
    list.kv_end[item] = min((high - begin) * kTile, group.kv_len);
  }
}

}  // namespace

extern "C" int latent_plan_run(const int64_t* starts, const int64_t* query_lens, const int64_t* first_rows, int* list,
                               int batch, int query_len, int groups, int group_rows, int num_heads, int table_stride,
                               int room, int cluster, int num_clusters, void* stream) {
  if (num_clusters > kMostClusters) return cudaErrorInvalidValue;
  const Problem p = {starts,     query_lens, first_rows,   list, batch,   query_len,   groups,
                     group_rows, num_heads,  table_stride, room, cluster, num_clusters};
  latent_plan<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}
